"""Generations of blocks, and the check that a read saw one generation."""
