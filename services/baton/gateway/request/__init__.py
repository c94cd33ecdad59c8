"""Carries one request from its receipt to its last token."""
