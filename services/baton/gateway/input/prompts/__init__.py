"""Rules for the tokens of prompts."""
