"""Errors that loadgen reports to the user. Each message says what to do; `main` prints it and exits with code
2."""


class LoadgenError(Exception):
    """Base class of loadgen's own errors. The message is written for the user."""


class BadPlan(LoadgenError):
    """A plan, a trace or plan arguments are invalid. The message names the file and the line."""


class EmptyPlan(BadPlan):
    """Valid plan arguments produced no request, by chance or because the time was too short."""


class BadRecords(LoadgenError):
    """A result directory or a record cannot be read. The message names the file and the line."""


class Unreachable(LoadgenError):
    """No server answers at an address."""


class WarmUpFailed(LoadgenError):
    """The server is reachable but answered none of the warm-up requests. An overloaded server may recover
    later."""


class UntrustedCertificate(LoadgenError):
    """The server's TLS certificate is not trusted on this machine. Waiting does not help."""
