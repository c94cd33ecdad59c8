"""Validates the fields that only chat requests have: messages, tools, and variables of the chat template."""
