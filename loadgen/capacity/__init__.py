"""Searches for the highest request rate at which the SLO is met."""
