"""TLS for gRPC: between the services of a cluster both sides prove that they belong to it; clients of the front door only the server.

Services dial each other by addresses that no certificate can know. So each one's certificate carries one name, `SERVICE_NAME`, and it is
for that name that both sides look, under a certificate authority of the cluster's own. Files are read again for each connection that is
dialled, and by servers when they change: certificates may be renewed while everything runs.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import grpc

from baton.core.errors import ConfigError
from baton.runtime.logging import get_logger
from baton.runtime.settings import TlsSettings
from baton.runtime.tls import Pair

log = get_logger(__name__)

SERVICE_NAME = "baton.internal"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """`pair`: this side's own; a client of the front door has none. `ca`: who signs the other side's; None for a server that takes any
    client, and for a client the authorities that the machine trusts. `name`: for which a client looks instead of the address."""

    pair: Pair | None = None
    ca: Path | None = None
    name: str = ""

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Raises ConfigError when a file cannot be read."""
        key, certificate = self.pair.read() if self.pair is not None else (None, None)
        ca = _read(self.ca) if self.ca is not None else None
        return grpc.ssl_channel_credentials(root_certificates=ca, private_key=key, certificate_chain=certificate)

    def server_credentials(self) -> grpc.ServerCredentials:
        """Follow the files. Raises ConfigError when one cannot be read now; a renewed one that cannot be is said in the log."""
        return grpc.dynamic_ssl_server_credentials(
            self._configuration(),
            _Renewed(self._version, self._configuration),  # type: ignore[arg-type]  # None is for no change, which the stubs do not know
            require_client_authentication=self.ca is not None,
        )

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        if self.pair is None:
            raise ConfigError("a server needs a certificate and its key")
        ca = _read(self.ca) if self.ca is not None else None
        return grpc.ssl_server_certificate_configuration([self.pair.read()], root_certificates=ca)

    def _version(self) -> tuple[float, ...]:
        files = [*(self.pair.files if self.pair is not None else ()), *([self.ca] if self.ca is not None else ())]
        return tuple(file.stat().st_mtime_ns for file in files)


class _Renewed:
    """Called by grpc, in threads of its own, for each connection: None where nothing has changed."""

    def __init__(self, version: Callable[[], tuple[float, ...]], make: Callable[[], grpc.ServerCertificateConfiguration]) -> None:
        self._version = version
        self._make = make
        self._last = version()
        self._lock = threading.Lock()

    def __call__(self) -> grpc.ServerCertificateConfiguration | None:
        with self._lock:
            try:
                now = self._version()
                if now == self._last:
                    return None
                self._last = now
                return self._make()
            except (OSError, ConfigError, ValueError) as error:
                log.warning("certificate_not_renewed", problem=str(error), hint="the one from before stays")
                return None


def between_services(settings: TlsSettings) -> Tls | None:
    """None: in plain text."""
    return None if settings.tls_pair is None else Tls(pair=settings.tls_pair, ca=settings.tls_ca, name=SERVICE_NAME)


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror or error}") from error
