"""The settings of TLS, between services and for clients."""

from pathlib import Path

from baton.core.errors import ConfigError
from baton.runtime.config.config_base import Config, config, setting
from baton.runtime.network.tls_files import Pair


@config
class TlsSettings(Config):
    """Read by every service: how they prove to each other that they belong to one cluster. Its certificates
    name `baton.internal`."""

    tls_cert: Path | None = setting(
        None, help="this service's certificate, PEM; without it services talk in plain text"
    )
    tls_key: Path | None = setting(None, help="key of --tls-cert, PEM")
    tls_ca: Path | None = setting(None, help="who signs the certificates of this cluster's services, PEM")

    def __post_init__(self) -> None:
        super().__post_init__()
        given = {"tls_cert": self.tls_cert, "tls_key": self.tls_key, "tls_ca": self.tls_ca}
        if None in given.values() and any(given.values()):
            missing = next(name for name, value in given.items() if value is None)
            raise ConfigError(f"{missing} is missing: TLS between services needs certificate, key and authority")

    @property
    def tls_pair(self) -> Pair | None:
        return (
            Pair(certificate=self.tls_cert, key=self.tls_key)
            if self.tls_cert is not None and self.tls_key is not None
            else None
        )


@config
class FrontTlsSettings(Config):
    """Read by the gateway: what its clients see."""

    front_tls_cert: Path | None = setting(
        None, help="certificate of the ports for clients, PEM; without it they are plain text"
    )
    front_tls_key: Path | None = setting(None, help="key of --front-tls-cert, PEM")

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.front_tls_cert is None) != (self.front_tls_key is None):
            raise ConfigError("front_tls_cert and front_tls_key belong together: give both or neither")

    @property
    def front_tls_pair(self) -> Pair | None:
        if self.front_tls_cert is None or self.front_tls_key is None:
            return None
        return Pair(certificate=self.front_tls_cert, key=self.front_tls_key)
