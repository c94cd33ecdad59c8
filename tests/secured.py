"""A cluster that trusts nobody: mTLS between its services, TLS and API keys at its doors, all of it made for
one test."""

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
    """`ours`: who signs this cluster's certificates. `keys`: the API keys by the name of their tenant,
    `admin` among them."""

    ours: Authority
    keys: Mapping[str, str]
    key_file: Path

    @staticmethod
    def new(directory: Path, *tenants: str) -> "Secured":
        """With a key for each tenant and for an admin, in new files below `directory`."""
        keys = {tenant: new_key() for tenant in (*tenants, ADMIN)}
        entries = [
            {"name": tenant, "tenant": tenant, "sha256": key_digest(key).hex(), "admin": tenant == ADMIN}
            for tenant, key in keys.items()
        ]
        file = directory / "keys.yaml"
        file.write_text(yaml.safe_dump({"salt": "5a" * 16, "keys": entries}))
        return Secured(ours=Authority.new(directory / "ours"), keys=keys, key_file=file)

    def settings(self) -> dict[str, str]:
        """For every service of the cluster."""
        front = self.ours.pair("front", "localhost", "127.0.0.1")
        return {
            **service_settings(self.ours.service()),
            "front_tls_cert": str(front.certificate),
            "front_tls_key": str(front.key),
            "api_keys": str(self.key_file),
        }

    def bearer(self, tenant: str) -> str:
        """The header `authorization`."""
        return f"Bearer {self.keys[tenant]}"

    @property
    def front(self) -> Tls:
        """How clients of the gRPC door see it."""
        return Tls(ca=self.ours.file)

    @property
    def trust(self) -> ssl.SSLContext:
        """How clients of the HTTP door see it."""
        return ssl.create_default_context(cafile=str(self.ours.file))


def service_settings(tls: Tls) -> dict[str, str]:
    """That a service has this certificate, key and authority."""
    assert tls.pair is not None
    return {"tls_cert": str(tls.pair.certificate), "tls_key": str(tls.pair.key), "tls_ca": str(tls.ca)}
