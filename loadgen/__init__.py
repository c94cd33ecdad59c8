"""Open-loop load generator for LLM servers: plans workloads, sends them, and reports what clients saw.

It imports only the generated `baton.v1` messages from `baton`.
"""
