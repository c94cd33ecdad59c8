"""Reads what constrains an answer: schemas, patterns, grammars and structural tags."""
