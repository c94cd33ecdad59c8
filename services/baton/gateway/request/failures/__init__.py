"""Failed attempts of a request: retry rules, history, and the search for a request that kills workers."""
