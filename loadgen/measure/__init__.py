"""Records of a run, and the metrics derived from them."""
