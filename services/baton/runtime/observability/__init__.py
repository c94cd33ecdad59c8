"""Metrics, traces, health and the admin port."""
