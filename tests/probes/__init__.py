"""Black-box probes of a running gateway: requests that once took its memory or its event loop.

python -m tests.probes --pid PID [--url http://127.0.0.1:8000] [--grpc-port 8001] [--redis URL] [--only NAME,...]

Each probe acts as a client and watches the gateway process from outside. It works with any release of Baton.
"""
