"""Searches the highest rate at which the SLO holds."""
