"""How an invariant is asked for. Checks are for tests and audits: they read everything."""


def require(holds: bool, what: str) -> None:
    """Raises AssertionError, saying `what` is wrong, unless it `holds`."""
    if not holds:
        raise AssertionError(what)
