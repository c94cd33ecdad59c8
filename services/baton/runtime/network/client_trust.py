"""Determines what a client needs in order to trust a server's certificate, by a handshake in memory."""

import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.runtime.network.tls_files import CertificatePair

_MAX_MESSAGES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientTrust:
    """The names that a client needs to reach a server over TLS.

    ca: file of an authority that signs the certificate, None if none of the files does.
    name: a name in the certificate, empty if the host of its address is one.
    """

    ca: Path | None
    name: str = ""


def client_trust(pair: CertificatePair, authorities: Sequence[Path], host: str) -> ClientTrust:
    """Return the first of `authorities` that a client can trust the pair by, and the name to ask for.

    host: host of the server's address. Raises ConfigError if the pair cannot be used.
    """
    for ca in authorities:
        if (names := _verified_names(pair, ca)) is not None:
            return ClientTrust(ca=ca, name="" if not names or host in names else names[0])
    return ClientTrust(ca=None)


def _verified_names(pair: CertificatePair, ca: Path) -> list[str] | None:
    """Return the names and addresses in the certificate, or None if `ca` does not verify it."""
    client_context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client_context.check_hostname = False
    try:
        client_context.load_verify_locations(ca)
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = client_context.wrap_bio(to_client, to_server, server_side=False)
        server = pair.context().wrap_bio(to_server, to_client, server_side=True)
        for _ in range(_MAX_MESSAGES):
            if _advance(client) & _advance(server):
                break
    except (OSError, ssl.SSLError):
        return None
    certificate: Any = client.getpeercert() or {}
    return [value for kind, value in certificate.get("subjectAltName", ()) if kind in ("DNS", "IP Address")]


def _advance(side: ssl.SSLObject) -> bool:
    """Continue a handshake. Return True if it is complete. Raises ssl.SSLError if it has failed."""
    try:
        side.do_handshake()
    except ssl.SSLWantReadError:
        return False
    return True
