"""Executors that need no model: the emulated device."""
