"""Writes grammars for llguidance: the formats in which models call tools, with the tools' schemas in them."""
