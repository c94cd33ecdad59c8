"""TLS for gRPC: between the services of a cluster both sides prove that they belong to it; clients of the
front door only the server.

Services dial each other by addresses that no certificate can know. So each one's certificate carries one
name, `SERVICE_NAME`, and it is for that name that both sides look, under a certificate authority of the
cluster's own. Files are looked at again while everything runs, so that certificates may be renewed: new
connections use what they say then, or what they last said that could be used.
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
"""grpc's key for the names of the other side's certificate, each as bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """`pair`: this side's own; a client of the front door has none. `ca`: who signs the other side's; None
    for a server that takes any client, and for a client the authorities that come with grpc. `name`: for
    which a client looks instead of the address, and a server with `ca` in its clients' certificates."""

    pair: CertificatePair | None = None
    ca: Path | None = None
    name: str = ""

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """What the files say now. Raises ConfigError when one cannot be used."""
        key, certificate = self.pair.read() if self.pair is not None else (None, None)
        ca = read_authorities(self.ca) if self.ca is not None else None
        return grpc.ssl_channel_credentials(root_certificates=ca, private_key=key, certificate_chain=certificate)

    def followed_credentials(self) -> WatchedFiles[grpc.ChannelCredentials]:
        """For who dials for a long time. Raises ConfigError when a file cannot be used at first."""
        return WatchedFiles(self.channel_credentials, *self._files, event=CERTIFICATE_RELOAD_FAILED)

    def server_credentials(self) -> grpc.ServerCredentials:
        """Follow the files. Raises ConfigError when one cannot be used at first."""
        followed = WatchedFiles(self._configuration, *self._files, event=CERTIFICATE_RELOAD_FAILED)
        return grpc.dynamic_ssl_server_credentials(
            followed.value,
            followed.reload_if_changed,  # type: ignore[arg-type]  # in grpc's threads, for each connection; None is for no change, which the stubs lack
            require_client_authentication=self.ca is not None,
        )

    def interceptors(self) -> tuple[grpc.aio.ServerInterceptor, ...]:
        """What a server has to check of each call, where the handshake does not."""
        return (HearNamed(self.name),) if self.ca is not None and self.name else ()

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        if self.pair is None:
            raise ConfigError("a server needs a certificate and its key")
        ca = read_authorities(self.ca) if self.ca is not None else None
        return grpc.ssl_server_certificate_configuration([self.pair.read()], root_certificates=ca)

    @property
    def _files(self) -> tuple[Path, ...]:
        return (*(self.pair.files if self.pair is not None else ()), *((self.ca,) if self.ca is not None else ()))


class HearNamed(grpc.aio.ServerInterceptor):
    """Refuses calls of those whose certificate does not carry `name`. A handshake looks at who has signed a
    client's certificate, not at whom it names, and an authority may sign for others, too. Methods are
    coroutines, as all between services are."""

    def __init__(self, name: str) -> None:
        self._name = name

    async def intercept_service(self, continuation: Any, handler_call_details: grpc.HandlerCallDetails) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        kind = f"{_arity(handler.request_streaming)}_{_arity(handler.response_streaming)}"
        answer: Callable[[Any, Any], Awaitable[Any]] = getattr(handler, kind)

        async def answer_named(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            if self._name.encode() not in context.auth_context().get(_NAMES, ()):
                # Without a Failure: to who has called, this is as good as nobody there.
                await context.abort(
                    grpc.StatusCode.UNAUTHENTICATED, f"the caller's certificate does not name {self._name}"
                )
            return await answer(request, context)

        make = getattr(grpc, f"{kind}_rpc_method_handler")
        return make(
            answer_named,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )


def between_services(settings: TlsSettings) -> Tls | None:
    """None: in plain text."""
    return None if settings.tls_pair is None else Tls(pair=settings.tls_pair, ca=settings.tls_ca, name=SERVICE_NAME)


def _arity(is_stream: bool) -> str:
    return "stream" if is_stream else "unary"
