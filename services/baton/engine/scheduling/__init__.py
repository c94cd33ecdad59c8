"""Decides which sequences run in the next step and which blocks they get."""
