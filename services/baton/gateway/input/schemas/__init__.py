"""Reads JSON schemas that clients send, and writes them with the keywords that llguidance knows."""
