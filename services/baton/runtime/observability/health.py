"""What a process says of itself: does it live, can it serve. HTTP's `/health` and `/ready` and gRPC's health
service read it."""

from collections.abc import Callable

Listener = Callable[["Health"], None]


class Health:
    """Liveness and readiness of one service.

    A service is ready when every part that it named is, and it neither drains nor has failed. It lives until
    it has failed, which is for ever: a failed process exits and is started anew. One thread, the service's
    loop, calls this.
    """

    def __init__(self, *parts: str) -> None:
        """Every one of `parts` has to report ready first."""
        self._waiting_for: dict[str, str] = dict.fromkeys(parts, "starting")
        self._failure = ""
        self._draining = False
        self._listeners: list[Listener] = []

    @property
    def is_alive(self) -> bool:
        return not self._failure

    @property
    def is_draining(self) -> bool:
        return self._draining

    @property
    def is_ready(self) -> bool:
        return not self.reasons

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why it is not ready, one sentence a part; empty when it is."""
        reasons = [f"{part}: {why}" for part, why in self._waiting_for.items()]
        if self._draining:
            reasons.append("draining")
        if self._failure:
            reasons.append(f"failed: {self._failure}")
        return tuple(reasons)

    def ready(self, part: str) -> None:
        """`part` can serve."""
        self._change(lambda: self._waiting_for.pop(part, None))

    def not_ready(self, part: str, why: str) -> None:
        """`part` cannot serve, until `ready(part)`."""
        self._change(lambda: self._waiting_for.update({part: why}))

    def drain(self) -> None:
        """The process takes no new work any more."""
        self._change(lambda: setattr(self, "_draining", True))

    def fail(self, why: str) -> None:
        """The process must not serve again; the first reason stays."""
        self._change(lambda: setattr(self, "_failure", self._failure or why))

    def on_change(self, listener: Listener) -> None:
        """Call `listener` now, and whenever liveness or readiness has changed."""
        self._listeners.append(listener)
        listener(self)

    def _change(self, action: Callable[[], object]) -> None:
        before = (self.is_alive, self.is_ready)
        action()
        if (self.is_alive, self.is_ready) != before:
            for listener in self._listeners:
                listener(self)
