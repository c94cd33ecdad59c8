#!/usr/bin/env python3
"""Health check of a container: requests `/health` at the admin port (BATON_ADMIN_PORT) or the gateway's HTTP
port."""

import os
import ssl
import sys
import urllib.error
import urllib.request

TIMEOUT_S = 4.0


def main() -> int:
    """Return 0 if the service is healthy, else 1 with the reason on standard error."""
    port = os.environ.get("BATON_ADMIN_PORT") or os.environ.get("BATON_HTTP_PORT") or "8000"
    # The gateway's port may use TLS. Its certificate need not be verified from inside the container.
    has_tls = "BATON_ADMIN_PORT" not in os.environ and "BATON_FRONT_TLS_CERT" in os.environ
    context = ssl._create_unverified_context() if has_tls else None
    url = f"{'https' if has_tls else 'http'}://127.0.0.1:{port}/health"
    try:
        urllib.request.urlopen(url, timeout=TIMEOUT_S, context=context).close()
    except (OSError, urllib.error.URLError) as error:
        sys.stderr.write(f"{url}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
