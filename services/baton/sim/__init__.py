"""Simulates a cluster under virtual time: the real services over simulated device, network and store."""
