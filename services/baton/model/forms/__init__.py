"""Describes what a model computes, as far as it is a decoder of a common form."""
