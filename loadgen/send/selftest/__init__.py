"""Measures the timing error of loadgen itself against a scripted server."""
