"""Reads the fields that constrain an answer: schemas, patterns, grammars and structural tags."""
