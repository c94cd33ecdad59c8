"""Reads and validates what only chat requests have: messages, tools, and variables of the chat template."""
