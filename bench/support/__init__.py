"""Helpers of the scenarios: load, roofline, saved figures, tables and charts."""
