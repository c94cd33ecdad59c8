"""Reads GGUF files: header, tensors, configuration, tokenizer."""
