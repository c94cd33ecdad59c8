"""Records of single requests, and where their phases lie in time."""
