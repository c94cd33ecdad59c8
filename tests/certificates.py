"""Certificates of a test's own authorities, in files as services get them."""

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import trustme
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from baton.rpc.grpc_tls import SERVICE_NAME, Tls
from baton.runtime.network.tls_files import CertificatePair


@dataclass(frozen=True, slots=True)
class Authority:
    """One authority, and where its certificates are written."""

    directory: Path
    ca: trustme.CA

    @staticmethod
    def new(directory: Path) -> "Authority":
        directory.mkdir()
        made = Authority(directory, trustme.CA())
        made.ca.cert_pem.write_to_path(str(made.file))
        return made

    @property
    def file(self) -> Path:
        return self.directory / "ca.pem"

    def pair(self, file: str, *names: str, ends: datetime | None = None) -> CertificatePair:
        """Certificate and key for these names, written over what is there."""
        pair = CertificatePair(certificate=self.directory / f"{file}.pem", key=self.directory / f"{file}.key")
        made = self.ca.issue_cert(*names, not_after=ends)
        made.private_key_pem.write_to_path(str(pair.key))
        pair.certificate.write_bytes(b"".join(blob.bytes() for blob in made.cert_chain_pems))
        return pair

    def service(self, file: str = "service", name: str = SERVICE_NAME, ends: datetime | None = None) -> Tls:
        """What a service of this authority's cluster has."""
        return Tls(pair=self.pair(file, name, ends=ends), ca=self.file, name=SERVICE_NAME)


def locked(pair: CertificatePair) -> CertificatePair:
    """That pair, with its key behind a password."""
    key = load_pem_private_key(pair.key.read_bytes(), password=None)
    pair.key.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")))
    return pair
