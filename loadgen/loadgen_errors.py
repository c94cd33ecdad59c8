"""What can go wrong before or beside a run, each with what to do about it. `main` prints the message and
exits 2."""


class LoadgenError(Exception):
    """Base of loadgen's own errors; the message is for the user."""


class BadPlan(LoadgenError):
    """A plan, trace or arguments for one that cannot be used; names the file and the line."""


class NothingArrives(BadPlan):
    """Arguments are fine, but by chance (or for lack of time) not one request comes of them."""


class BadRecords(LoadgenError):
    """A result directory or record that cannot be read; names the file and the line."""


class Unreachable(LoadgenError):
    """No server answers at an address."""


class NoWarmUp(LoadgenError):
    """A server is there, and answers none of the requests before a run. One that has just had too much may do
    so later."""


class NotTrusted(LoadgenError):
    """A server is there, and its TLS certificate is none that is trusted here: waiting does not mend that."""
