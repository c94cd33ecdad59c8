"""Certificates as files, and what OpenSSL makes of them."""

import ssl
from dataclasses import dataclass
from pathlib import Path

from baton.core.errors import ConfigError
from baton.runtime.process.watched_files import version_of

NOT_RENEWED = "certificate_not_renewed"
"""What the log calls files that have changed into what cannot be used."""
BUNDLES = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
)
"""Where distributions keep the authorities that a machine trusts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A certificate chain and its key, in PEM."""

    certificate: Path
    key: Path

    @property
    def files(self) -> tuple[Path, Path]:
        return self.certificate, self.key

    def read(self) -> tuple[bytes, bytes]:
        """(key, certificate chain). Raises ConfigError when they cannot be read, do not belong together or
        are replaced meanwhile."""
        version = version_of(*self.files)
        self.check()
        pair = read_file(self.key), read_file(self.certificate)
        if version_of(*self.files) != version:  # then it may not be these that were checked
            raise ConfigError(f"{self.certificate} and {self.key} are being replaced just now")
        return pair

    def check(self) -> None:
        """Raises ConfigError saying what is wrong with them."""
        self.context()

    def context(self) -> ssl.SSLContext:
        """For a server of one's own. Raises as `check`."""

        def ask() -> str:  # OpenSSL by itself would ask on the terminal, and wait
            raise ConfigError(
                f"{self.key} is encrypted, and there is nobody to ask for its password: give a key without one"
            )

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        for file in self.files:
            if not file.is_file():
                raise ConfigError(f"cannot read {file}: there is no such file")
        try:
            context.load_cert_chain(self.certificate, self.key, password=ask)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"{self.certificate} and {self.key} are no certificate and its key: {error}") from error
        return context


def read_authorities(file: Path) -> bytes:
    """Raises ConfigError when it cannot be read or holds no certificates."""
    read = read_file(file)
    text = read.decode("ascii", "ignore")  # comments between certificates may be in any script
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=text)
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(f"{file} holds no certificates of authorities: {error}") from error
    return read


def machine_authorities() -> Path:
    """The file of those whom this machine trusts: SSL_CERT_FILE, OpenSSL's or the distribution's. Raises
    ConfigError without one."""
    for file in (ssl.get_default_verify_paths().cafile, *BUNDLES):
        if file is not None and Path(file).is_file():
            return Path(file)
    raise ConfigError(
        "this machine has no file of authorities that it trusts where one would be; name one, or set SSL_CERT_FILE"
    )


def read_file(file: Path) -> bytes:
    """Raises ConfigError when it cannot be read."""
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror or error}") from error
