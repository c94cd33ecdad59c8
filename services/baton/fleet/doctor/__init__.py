"""Checks of `baton doctor`: what this machine has and lacks."""
