"""Declares, loads and validates settings."""
