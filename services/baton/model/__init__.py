"""Runs transformers models over paged KV memory. Only this package imports torch and transformers."""
