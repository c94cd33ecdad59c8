"""TLS settings: between services, and for clients."""

from pathlib import Path

from baton.core.errors import ConfigError
from baton.runtime.config.config_base import Config, config, setting
from baton.runtime.network.tls_files import CertificatePair


@config
class TlsSettings(Config):
    """Mutual TLS between the services of a cluster.

    All certificates must contain the name `baton.internal` and be signed by the authority in `tls_ca`.
    """

    tls_cert: Path | None = setting(
        None, help="PEM certificate of this service for mutual TLS between services; unset uses plain text"
    )
    tls_key: Path | None = setting(None, help="PEM private key of --tls-cert")
    tls_ca: Path | None = setting(None, help="PEM certificate of the authority that signs the cluster's certificates")

    def __post_init__(self) -> None:
        super().__post_init__()
        given = {"tls_cert": self.tls_cert, "tls_key": self.tls_key, "tls_ca": self.tls_ca}
        if None in given.values() and any(given.values()):
            missing = next(name for name, value in given.items() if value is None)
            raise ConfigError(f"{missing} is missing: TLS between services needs tls_cert, tls_key and tls_ca")

    @property
    def tls_pair(self) -> CertificatePair | None:
        """Certificate and key, or None without TLS."""
        return (
            CertificatePair(certificate=self.tls_cert, key=self.tls_key)
            if self.tls_cert is not None and self.tls_key is not None
            else None
        )


@config
class FrontTlsSettings(Config):
    """TLS of the ports that clients connect to."""

    front_tls_cert: Path | None = setting(
        None, help="PEM certificate of the HTTP and gRPC ports for clients; unset uses plain text"
    )
    front_tls_key: Path | None = setting(None, help="PEM private key of --front-tls-cert")

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.front_tls_cert is None) != (self.front_tls_key is None):
            raise ConfigError("front_tls_cert and front_tls_key must be set together")

    @property
    def front_tls_pair(self) -> CertificatePair | None:
        """Certificate and key, or None without TLS."""
        if self.front_tls_cert is None or self.front_tls_key is None:
            return None
        return CertificatePair(certificate=self.front_tls_cert, key=self.front_tls_key)
