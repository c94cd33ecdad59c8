"""Opens gRPC channels to Baton, in plain text or over TLS for addresses that begin with `https://`.

Import this module before grpc, which otherwise logs handshake errors to the user's terminal.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loadgen.loadgen_errors import LoadgenError, Unreachable, UntrustedCertificate

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

GRPCS_OWN, OPENSSLS = ("GRPC_DEFAULT_SSL_ROOTS_FILE_PATH", "SSL_CERT_FILE")
"""Environment variables that name a file of trusted certificate authorities.

gRPC's own variable takes precedence; OpenSSL's also applies to HTTP.
"""
_DISTRUST = {
    "CERTIFICATE_VERIFY_FAILED": "its certificate is not trusted; name a file of its authorities in {variable}",
    "Hostname Verification Check failed": "its certificate is for another host name",
}
_MEANINGS = {
    **_DISTRUST,
    "WRONG_VERSION_NUMBER": "it does not use TLS; leave out https://",
    "Socket closed": "it closed the connection; if it uses TLS, write https://",
}
"""Explanations by a fragment of gRPC's error text. `variable` is the environment variable for authorities."""


def open_channel(api: Any, url: str, options: Sequence[tuple[str, Any]] = (), *, is_insecure: bool = False) -> Any:
    """Return an unconnected channel.

    `api` is `grpc.aio`, or `grpc` for blocking calls. Raises LoadgenError if the address is invalid, if the
    authorities cannot be read, or for `is_insecure` over TLS, because gRPC always checks certificates.
    """
    address, is_tls = address_of(url)
    if not is_tls:
        return api.insecure_channel(address, options=options)
    if is_insecure:
        raise LoadgenError(
            "--insecure is not supported over gRPC, which always checks certificates; name the authorities of "
            f"{url} in {_variable()}"
        )
    import grpc

    return api.secure_channel(address, grpc.ssl_channel_credentials(authorities()), options=options)


def address_of(url: str) -> tuple[str, bool]:
    """Return (host:port, True for TLS). Raises LoadgenError if the address is invalid."""
    scheme, _, address = url.rpartition("://")
    if scheme.lower() not in ("", "grpc", "http", "https") or not address:
        raise LoadgenError(f"{url!r} is not a gRPC address; write host:port, or https://host:port for TLS")
    return address.rstrip("/"), scheme.lower() == "https"


def authorities() -> bytes | None:
    """Return the trusted authorities in PEM, or None for gRPC's built-in ones. Raises LoadgenError."""
    variable = _variable()
    file = os.environ.get(variable)
    if not file:
        return None
    try:
        pem = Path(file).read_bytes()
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=pem.decode("ascii", "ignore"))
    except (OSError, ValueError) as error:  # ssl's errors are OSErrors
        raise LoadgenError(f"{variable} names {file}, which contains no CA certificates: {error}") from error
    return pem


def unreachable(url: str, details: str) -> Unreachable | UntrustedCertificate:
    """Return the error for gRPC's `details`, with an explanation."""
    meaning = next(
        (meaning for words, meaning in _MEANINGS.items() if words in details),
        "Baton's default gRPC port is 8001",
    )
    kind = UntrustedCertificate if any(words in details for words in _DISTRUST) else Unreachable
    return kind(f"no Baton gRPC server answers at {url}; {meaning.format(variable=_variable())} (grpc: {details})")


def _variable() -> str:
    return GRPCS_OWN if os.environ.get(GRPCS_OWN) else OPENSSLS
