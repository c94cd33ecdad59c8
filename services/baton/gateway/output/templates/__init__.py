"""Interprets the declarative `response_template` of a tokenizer configuration."""
