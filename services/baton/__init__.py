"""Baton: large language models served with prefill and decode on different workers."""

__version__ = "0.1.0.dev0"
