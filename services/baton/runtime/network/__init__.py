"""Addresses, TLS files, in-process networking and membership announcements."""
