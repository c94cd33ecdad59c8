"""Gateway: serves clients over HTTP and gRPC, and owns each request from its receipt to its last token.

Only `gateway_main.py` imports `rpc` and `store`.
"""
