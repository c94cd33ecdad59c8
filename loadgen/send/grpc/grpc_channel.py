"""How Baton's gRPC door is reached: in plain text, or over TLS where its address begins with `https://`.
Import it before grpc, which otherwise writes into the user's terminal what goes wrong with a handshake."""

from __future__ import annotations

import os
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loadgen.loadgen_errors import LoadgenError, NotTrusted, Unreachable

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

GRPCS_OWN, OPENSSLS = AUTHORITIES = ("GRPC_DEFAULT_SSL_ROOTS_FILE_PATH", "SSL_CERT_FILE")
"""Variables that name a file of those whom TLS trusts. grpc's own goes before; OpenSSL's holds for HTTP,
too."""
_DISTRUST = {
    "CERTIFICATE_VERIFY_FAILED": "its certificate is not trusted here, name its authorities in {variable}",
    "Hostname Verification Check failed": "its certificate is not for this name",
}
_MEANINGS = {
    **_DISTRUST,
    "WRONG_VERSION_NUMBER": "it does not speak TLS, leave out https://",
    "Socket closed": "it hangs up: does it speak TLS (https://)?",
}
"""What stands in grpc's words, and what to make of it. `variable`: which names authorities here."""


def open_channel(api: Any, url: str, options: Sequence[tuple[str, Any]] = (), *, is_insecure: bool = False) -> Any:
    """Nothing is dialled yet. `api`: `grpc.aio`, or `grpc` for who waits. Raises LoadgenError for an address
    that is none, for authorities that cannot be read, and over TLS for `is_insecure`: grpc always checks."""
    address, is_tls = address_of(url)
    if not is_tls:
        return api.insecure_channel(address, options=options)
    if is_insecure:
        raise LoadgenError(
            f"gRPC checks every certificate, so --insecure is not for {url}: name its authorities in {_variable()}"
        )
    import grpc

    return api.secure_channel(address, grpc.ssl_channel_credentials(authorities()), options=options)


def address_of(url: str) -> tuple[str, bool]:
    """(host:port, whether over TLS). Raises LoadgenError."""
    scheme, _, address = url.rpartition("://")
    if scheme.lower() not in ("", "grpc", "http", "https") or not address:
        raise LoadgenError(f"{url!r} is no address of a gRPC server: write host:port, or https://host:port for TLS")
    return address.rstrip("/"), scheme.lower() == "https"


def authorities() -> bytes | None:
    """In PEM; None: those that come with grpc. Raises LoadgenError."""
    variable = _variable()
    file = os.environ.get(variable)
    if not file:
        return None
    try:
        pem = Path(file).read_bytes()
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=pem.decode("ascii", "ignore"))
    except (OSError, ValueError) as error:  # ssl's errors are OSErrors
        raise LoadgenError(f"{variable} names {file}, which holds no certificates of authorities: {error}") from error
    return pem


def unreachable(url: str, details: str) -> Unreachable | NotTrusted:
    """`details`: grpc's."""
    meaning = next(
        (meaning for words, meaning in _MEANINGS.items() if words in details),
        "Baton's is at port 8001 unless told otherwise",
    )
    kind = NotTrusted if any(words in details for words in _DISTRUST) else Unreachable
    return kind(f"no gRPC server of Baton's answers at {url}; {meaning.format(variable=_variable())} (grpc: {details})")


def _variable() -> str:
    return GRPCS_OWN if os.environ.get(GRPCS_OWN) else OPENSSLS
