"""Calls of clients that use the model or its tokenizer."""
