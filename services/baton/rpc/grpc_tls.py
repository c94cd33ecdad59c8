"""TLS for gRPC: mutual between the services of a cluster, server-only for clients.

Addresses of services are not known when certificates are issued. So each certificate contains the name
`SERVICE_NAME` and is signed by the cluster's own authority, and both sides check for that name. Renewed
certificates are used for new connections without a restart. If a renewal cannot be used, the last valid
certificates stay in use.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from baton.core.errors import ConfigError
from baton.runtime.config.tls_settings import TlsSettings
from baton.runtime.network.tls_files import CERTIFICATE_RELOAD_FAILED, CertificatePair, read_authorities
from baton.runtime.process.watched_files import WatchedFiles

SERVICE_NAME = "baton.internal"
_NAMES = "x509_subject_alternative_name"
"""Key in grpc's auth context for the names in the peer's certificate, as bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """TLS configuration of one side of a connection.

    pair: this side's certificate and key; None for a client of the public API.
    ca: authority of the peer's certificate. None: a server accepts any client, and a client uses grpc's CAs.
    name: name that a client expects in the server's certificate instead of its address. A server with `ca`
    expects it in its clients' certificates.
    """

    pair: CertificatePair | None = None
    ca: Path | None = None
    name: str = ""

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Load the credentials of a client. Raises ConfigError if a file cannot be used."""
        key, certificate = self.pair.read() if self.pair is not None else (None, None)
        ca = read_authorities(self.ca) if self.ca is not None else None
        return grpc.ssl_channel_credentials(root_certificates=ca, private_key=key, certificate_chain=certificate)

    def followed_credentials(self) -> WatchedFiles[grpc.ChannelCredentials]:
        """Load the credentials of a long-lived client, which follow renewals. Raises ConfigError at first."""
        return WatchedFiles(self.channel_credentials, *self._files, event=CERTIFICATE_RELOAD_FAILED)

    def server_credentials(self) -> grpc.ServerCredentials:
        """Load the credentials of a server, which follow renewals. Raises ConfigError at first."""
        followed = WatchedFiles(self._configuration, *self._files, event=CERTIFICATE_RELOAD_FAILED)
        return grpc.dynamic_ssl_server_credentials(
            followed.value,
            # called in grpc's threads for each connection; None means no change, which the stubs lack
            followed.reload_if_changed,  # type: ignore[arg-type]
            require_client_authentication=self.ca is not None,
        )

    def interceptors(self) -> tuple[grpc.aio.ServerInterceptor, ...]:
        """Return the server interceptors for checks that the TLS handshake does not make."""
        return (RequireClientName(self.name),) if self.ca is not None and self.name else ()

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        if self.pair is None:
            raise ConfigError("a server needs a certificate and its key")
        ca = read_authorities(self.ca) if self.ca is not None else None
        return grpc.ssl_server_certificate_configuration([self.pair.read()], root_certificates=ca)

    @property
    def _files(self) -> tuple[Path, ...]:
        return (*(self.pair.files if self.pair is not None else ()), *((self.ca,) if self.ca is not None else ()))


class RequireClientName(grpc.aio.ServerInterceptor):
    """Refuses calls from clients whose certificate does not contain `name`.

    The handshake checks only the authority of a client's certificate, and an authority may sign certificates
    of others. All methods must be coroutines.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    async def intercept_service(self, continuation: Any, handler_call_details: grpc.HandlerCallDetails) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        kind = f"{_arity(handler.request_streaming)}_{_arity(handler.response_streaming)}"
        serve: Callable[[Any, Any], Awaitable[Any]] = getattr(handler, kind)

        async def serve_named(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            if self._name.encode() not in context.auth_context().get(_NAMES, ()):
                # without a Failure, so that the client treats this server as unreachable
                await context.abort(
                    grpc.StatusCode.UNAUTHENTICATED, f"the caller's certificate does not name {self._name}"
                )
            return await serve(request, context)

        make = getattr(grpc, f"{kind}_rpc_method_handler")
        return make(
            serve_named,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )


def between_services(settings: TlsSettings) -> Tls | None:
    """Return the TLS configuration between services, or None for plain text."""
    return None if settings.tls_pair is None else Tls(pair=settings.tls_pair, ca=settings.tls_ca, name=SERVICE_NAME)


def _arity(is_stream: bool) -> str:
    return "stream" if is_stream else "unary"
