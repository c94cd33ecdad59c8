"""Records of a run, and the metrics computed from them."""
