"""Decisions about slower tiers of KV: what is copied out, where it is kept, and when reloading pays."""
