"""Messages of the streams between gateways and workers, and between workers."""
