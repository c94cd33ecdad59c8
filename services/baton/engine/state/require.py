"""`require`: the assertion that invariant checks use. The checks read all state, so only tests and audits run
them."""


def require(holds: bool, what: str) -> None:
    """Raise AssertionError with the message `what` if `holds` is false."""
    if not holds:
        raise AssertionError(what)
