"""Packed models in files that the workers of a machine share."""
