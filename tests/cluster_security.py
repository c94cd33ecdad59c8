"""Certificates and API keys of a secured test cluster: mTLS between services, TLS and API keys for
clients."""

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from baton.gateway.auth.api_keys import key_digest, new_key
from baton.rpc.grpc_tls import Tls
from tests.certificates import Authority

ADMIN = "admin"


@dataclass(frozen=True, slots=True, kw_only=True)
class Secured:
    """The security files of a cluster.

    ours: the CA of this cluster.
    keys: API keys by tenant, including `admin`.
    """

    ours: Authority
    keys: Mapping[str, str]
    key_file: Path

    @staticmethod
    def new(directory: Path, *tenants: str) -> "Secured":
        """Create a key for each tenant and for an admin, in new files below `directory`."""
        keys = {tenant: new_key() for tenant in (*tenants, ADMIN)}
        entries = [
            {"name": tenant, "tenant": tenant, "sha256": key_digest(key).hex(), "admin": tenant == ADMIN}
            for tenant, key in keys.items()
        ]
        file = directory / "keys.yaml"
        file.write_text(yaml.safe_dump({"salt": "5a" * 16, "keys": entries}))
        return Secured(ours=Authority.new(directory / "ours"), keys=keys, key_file=file)

    def settings(self) -> dict[str, str]:
        """Return the settings for all services of the cluster."""
        front = self.ours.pair("front", "localhost", "127.0.0.1")
        return {
            **service_settings(self.ours.service()),
            "front_tls_cert": str(front.certificate),
            "front_tls_key": str(front.key),
            "api_keys": str(self.key_file),
        }

    def bearer(self, tenant: str) -> str:
        """Return the `authorization` header of a tenant."""
        return f"Bearer {self.keys[tenant]}"

    @property
    def front(self) -> Tls:
        """TLS settings of gRPC clients."""
        return Tls(ca=self.ours.file)

    @property
    def trust(self) -> ssl.SSLContext:
        """TLS context of HTTP clients."""
        return ssl.create_default_context(cafile=str(self.ours.file))


def service_settings(tls: Tls) -> dict[str, str]:
    """Return the settings for a certificate, key and CA."""
    assert tls.pair is not None
    return {"tls_cert": str(tls.pair.certificate), "tls_key": str(tls.pair.key), "tls_ca": str(tls.ca)}
