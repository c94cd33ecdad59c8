"""The transfer backend over NIXL."""
