"""KV transfer between workers: the reader pulls blocks under a lease and validates each read."""
