"""Certificates of test CAs, in files as services expect them."""

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
    """A CA and the directory of its certificates."""

    directory: Path
    ca: trustme.CA

    @staticmethod
    def new(directory: Path) -> "Authority":
        directory.mkdir()
        authority = Authority(directory, trustme.CA())
        authority.ca.cert_pem.write_to_path(str(authority.file))
        return authority

    @property
    def file(self) -> Path:
        return self.directory / "ca.pem"

    def pair(self, file: str, *names: str, ends: datetime | None = None) -> CertificatePair:
        """Issue a certificate and key for these names. Existing files are overwritten."""
        pair = CertificatePair(certificate=self.directory / f"{file}.pem", key=self.directory / f"{file}.key")
        issued = self.ca.issue_cert(*names, not_after=ends)
        issued.private_key_pem.write_to_path(str(pair.key))
        pair.certificate.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        return pair

    def service(self, file: str = "service", name: str = SERVICE_NAME, ends: datetime | None = None) -> Tls:
        """Return the TLS settings of a service with a certificate of this CA."""
        return Tls(pair=self.pair(file, name, ends=ends), ca=self.file, name=SERVICE_NAME)


def locked(pair: CertificatePair) -> CertificatePair:
    """Encrypt the key of a pair with a password, and return the pair."""
    key = load_pem_private_key(pair.key.read_bytes(), password=None)
    pair.key.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")))
    return pair
