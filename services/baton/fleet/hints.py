"""The commands that `baton up` suggests, which can be copied as they are. Pure functions."""

import json
import shlex
from urllib.parse import urlsplit

from baton.runtime.process.run_file import RunningCluster

KEY = '"$BATON_API_KEY"'
CA_PLACEHOLDER = "CA.pem"
"""Stands in a command for the authority of the gateway's certificate if no file of it is known."""


def curl_hint(cluster: RunningCluster, *, cacert: str = "") -> str:
    """Return a curl command that streams a chat answer.

    cacert: file for curl's --cacert; empty for plain text, or if the machine trusts the certificate.
    """
    body = json.dumps(
        {"model": cluster.model, "stream": True, "messages": [{"role": "user", "content": "What does os.getcwd do?"}]}
    )
    parts = ["curl -N"]
    url = urlsplit(cluster.url)
    if cluster.name:
        parts.append(f"--connect-to {shlex.quote(f'{cluster.name}:{url.port}:{url.netloc}')}")
        url = url._replace(netloc=f"{cluster.name}:{url.port}")
    if cacert:
        parts.append(f"--cacert {shlex.quote(cacert)}")
    parts.append(shlex.quote(f"{url.geturl()}/v1/chat/completions"))
    if cluster.needs_key:
        parts.append('-H "authorization: Bearer $BATON_API_KEY"')
    parts += ["-H 'content-type: application/json'", f"-d {shlex.quote(body)}"]
    return " ".join(parts)


def explain_hint(cluster: RunningCluster) -> str:
    """Return the `baton explain last` that asks this cluster."""
    parts = [f"baton explain last --gateway {shlex.quote(cluster.gateway)}"]
    if cluster.url.startswith("https:"):
        parts.append(f"--gateway-ca {shlex.quote(cluster.ca or CA_PLACEHOLDER)}")
    if cluster.name:
        parts.append(f"--gateway-name {shlex.quote(cluster.name)}")
    if cluster.needs_key:
        parts.append(f"--api-key {KEY}")
    return " ".join(parts)


def key_hint(cluster: RunningCluster) -> str:
    """Return the line that explains the key in the commands, or "" without keys."""
    if not cluster.needs_key:
        return ""
    return "API keys are on: export BATON_API_KEY=... first; explain, status and drain need an admin's key"
