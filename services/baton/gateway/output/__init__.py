"""Parses the text of a model into reasoning, content and tool calls. Pure code, without I/O."""
