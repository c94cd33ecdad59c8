"""Liveness and readiness of a process, for HTTP `/health` and `/ready` and the gRPC health service."""

from collections.abc import Callable

Listener = Callable[["Health"], None]


class Health:
    """Liveness and readiness of one service.

    A service is ready if all of its parts are ready and it neither drains nor has failed. It is alive until
    it fails. A failure is final: the process exits and is restarted. Not thread-safe; use it on the service's
    loop.
    """

    def __init__(self, *parts: str) -> None:
        """Create the health of a service with these parts, none of which is ready yet."""
        self._waiting_for: dict[str, str] = dict.fromkeys(parts, "starting")
        self._failure = ""
        self._draining = False
        self._listeners: list[Listener] = []

    @property
    def is_alive(self) -> bool:
        """True until `fail`."""
        return not self._failure

    @property
    def is_draining(self) -> bool:
        """True after `drain`."""
        return self._draining

    @property
    def is_ready(self) -> bool:
        """True if the service can serve requests."""
        return not self.reasons

    @property
    def reasons(self) -> tuple[str, ...]:
        """Reasons why the service is not ready, one per part; empty if it is ready."""
        reasons = [f"{part}: {why}" for part, why in self._waiting_for.items()]
        if self._draining:
            reasons.append("draining")
        if self._failure:
            reasons.append(f"failed: {self._failure}")
        return tuple(reasons)

    def ready(self, part: str) -> None:
        """Mark `part` as ready."""
        self._change(lambda: self._waiting_for.pop(part, None))

    def not_ready(self, part: str, why: str) -> None:
        """Mark `part` as not ready, with a reason, until `ready(part)`."""
        self._change(lambda: self._waiting_for.update({part: why}))

    def drain(self) -> None:
        """Mark the process as draining: it takes no new work."""
        self._change(lambda: setattr(self, "_draining", True))

    def fail(self, why: str) -> None:
        """Mark the process as failed for good. The first reason is kept."""
        self._change(lambda: setattr(self, "_failure", self._failure or why))

    def on_change(self, listener: Listener) -> None:
        """Call `listener` now and after every change of liveness or readiness."""
        self._listeners.append(listener)
        listener(self)

    def _change(self, action: Callable[[], object]) -> None:
        before = (self.is_alive, self.is_ready)
        action()
        if (self.is_alive, self.is_ready) != before:
            for listener in self._listeners:
                listener(self)
