"""Gates of client calls: they decide which messages are read, and when."""
