"""Certificates as files, and what OpenSSL makes of them."""

import ssl
from dataclasses import dataclass
from pathlib import Path

from baton.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A certificate chain and its key, in PEM."""

    certificate: Path
    key: Path

    @property
    def files(self) -> tuple[Path, Path]:
        return self.certificate, self.key

    def version(self) -> tuple[int, ...] | None:
        """Changes when the files do; None while one is missing."""
        try:
            return tuple(file.stat().st_mtime_ns for file in self.files)
        except OSError:
            return None

    def read(self) -> tuple[bytes, bytes]:
        """(key, certificate chain). Raises ConfigError when they cannot be read or do not belong together."""
        self.check()
        try:
            return self.key.read_bytes(), self.certificate.read_bytes()
        except OSError as error:
            raise ConfigError(f"cannot read {error.filename}: {error.strerror or error}") from error

    def check(self) -> None:
        """Raises ConfigError saying what is wrong with them."""
        self.context()

    def context(self) -> ssl.SSLContext:
        """For a server of one's own. Raises as `check`."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        for file in self.files:
            if not file.is_file():
                raise ConfigError(f"cannot read {file}: there is no such file")
        try:
            context.load_cert_chain(self.certificate, self.key)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"{self.certificate} and {self.key} are no certificate and its key: {error}") from error
        return context
