#!/usr/bin/env python3
"""Health check of a container: requests `/health` at the admin port (BATON_ADMIN_PORT) or the gateway's HTTP
port.

Either port may use TLS, which settings files can decide, so both schemes are tried.
"""

import http.client
import os
import ssl
import sys
import urllib.request

TIMEOUT_S = 2.0


def main() -> int:
    """Return 0 if the service is healthy, else 1 with the reason on standard error."""
    port = os.environ.get("BATON_ADMIN_PORT") or os.environ.get("BATON_HTTP_PORT") or "8000"
    context = ssl._create_unverified_context()  # from inside the container, the certificate need not be verified
    problems = []
    for scheme in ("http", "https"):
        url = f"{scheme}://127.0.0.1:{port}/health"
        try:
            urllib.request.urlopen(url, timeout=TIMEOUT_S, context=context).close()
        except (OSError, http.client.HTTPException) as error:
            problems.append(f"{url}: {error}\n")
        else:
            return 0
    sys.stderr.write("".join(problems))
    return 1


if __name__ == "__main__":
    sys.exit(main())
