"""Messages of the standing streams between gateways, workers and peers."""
