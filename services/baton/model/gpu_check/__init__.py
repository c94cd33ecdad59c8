"""Verifies the backends of a GPU in a child process, before the worker itself runs them."""
