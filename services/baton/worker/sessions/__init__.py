"""Standing sessions with gateways."""
