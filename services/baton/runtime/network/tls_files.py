"""Reads and validates certificate files."""

import ssl
from dataclasses import dataclass
from pathlib import Path

from baton.core.errors import ConfigError
from baton.runtime.process.watched_files import version_of

CERTIFICATE_RELOAD_FAILED = "certificate_reload_failed"
"""Log event for certificate files that have changed but cannot be used."""
BUNDLES = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
)
"""Files where distributions store the certificate authorities that a machine trusts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificatePair:
    """Files of a certificate chain and its private key, in PEM."""

    certificate: Path
    key: Path

    @property
    def files(self) -> tuple[Path, Path]:
        """Certificate file and key file."""
        return self.certificate, self.key

    def read(self) -> tuple[bytes, bytes]:
        """Read (key, certificate chain).

        Raises ConfigError if the files cannot be read, do not match, or are replaced during the read.
        """
        version = version_of(*self.files)
        self.check()
        pair = read_file(self.key), read_file(self.certificate)
        if version_of(*self.files) != version:  # the files read may not be those that were checked
            raise ConfigError(f"{self.certificate} and {self.key} are being replaced; try again")
        return pair

    def check(self) -> None:
        """Validate the files. Raises ConfigError naming the problem."""
        self.context()

    def context(self) -> ssl.SSLContext:
        """Create a TLS server context (1.2 or newer). Raises ConfigError if the files cannot be used."""

        def refuse_password() -> str:  # without this, OpenSSL would wait for a password on the terminal
            raise ConfigError(f"{self.key} is encrypted, and its password cannot be entered; use a key without one")

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        for file in self.files:
            if not file.is_file():
                raise ConfigError(f"cannot read {file}: no such file")
        try:
            context.load_cert_chain(self.certificate, self.key, password=refuse_password)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"{self.certificate} and {self.key} are not a certificate and its key: {error}"
            ) from error
        return context


def read_authorities(file: Path) -> bytes:
    """Read a PEM file of certificate authorities.

    Raises ConfigError if it cannot be read or contains no certificates.
    """
    content = read_file(file)
    text = content.decode("ascii", "ignore")  # comments between certificates may contain any characters
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=text)
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(f"{file} contains no CA certificates: {error}") from error
    return content


def machine_authorities() -> Path:
    """Find the file of certificate authorities that this machine trusts.

    Checks SSL_CERT_FILE, OpenSSL's default and the usual paths of distributions. Raises ConfigError if there
    is none.
    """
    for file in (ssl.get_default_verify_paths().cafile, *BUNDLES):
        if file is not None and Path(file).is_file():
            return Path(file)
    raise ConfigError("this machine has no CA file in a known place; name a file, or set SSL_CERT_FILE")


def read_file(file: Path) -> bytes:
    """Read a file. Raises ConfigError if it cannot be read."""
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror or error}") from error
