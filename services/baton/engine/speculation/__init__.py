"""Drafts: guesses of the next tokens of decoding sequences, and how many of them a step verifies."""
