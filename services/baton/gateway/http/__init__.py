"""The OpenAI API over HTTP: what arrives, what goes out, byte for byte."""
