"""Keeps what the scheduler knows about the cluster: reports, reservations, cached prefixes, open streams."""
