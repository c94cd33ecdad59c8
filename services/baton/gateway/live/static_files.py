"""The files of the live view, read once."""

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from importlib.resources import files

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)
"""No inline script or style, and nothing from other sites."""
_TYPES = {
    ".html": b"text/html; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticFile:
    """A file with its media type and a tag that changes with its content."""

    body: bytes
    content_type: bytes
    etag: bytes


def static_files() -> Mapping[str, StaticFile]:
    """Return the files by name."""
    found = {}
    for file in files("baton.gateway.live").joinpath("static").iterdir():
        kind = _TYPES.get(file.name[file.name.rfind(".") :])
        if kind is not None:
            body = file.read_bytes()
            tag = b'"%s"' % sha256(body).hexdigest()[:32].encode()
            found[file.name] = StaticFile(body=body, content_type=kind, etag=tag)
    return found
