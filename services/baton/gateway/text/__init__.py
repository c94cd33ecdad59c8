"""Converts text to tokens and back: tokenizer, chat template, detokenizer and stop strings."""
