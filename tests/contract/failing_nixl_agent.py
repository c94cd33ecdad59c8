"""A NIXL agent whose calls raise NIXL's own exceptions on command, around a real agent that does the work."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from baton.transfer.backends.nixl import nixl_backend, nixl_thread


def nixl_error(name: str) -> Exception:
    """Return an instance of one of NIXL's exceptions, such as `nixlBackendError`, or of a Python one."""
    from nixl._api import nixlBind

    error = getattr(nixlBind, name, None) or {"RuntimeError": RuntimeError, "TypeError": TypeError}[name]
    return error("injected")


class FailingAgent:
    """Forwards to `agent`; a call of a method in `errors` raises, after a transfer was posted.

    errors: by method name. counts: how often each has raised
    remaining: how often a method still raises; without an entry it always does
    notifications: number of notification calls that succeeded
    """

    def __init__(self, agent: Any) -> None:
        self._inner = agent
        self.errors: dict[str, str] = {}
        self.counts: dict[str, int] = {}
        self.remaining: dict[str, int] = {}
        self.notifications = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def transfer(self, handle: Any) -> str:
        state = self._inner.transfer(handle)
        self._raise("transfer")
        return str(state)

    def check_xfer_state(self, handle: Any) -> str:
        self._raise("check_xfer_state")
        return str(self._inner.check_xfer_state(handle))

    def get_new_notifs(self) -> Any:
        self._raise("get_new_notifs")
        self.notifications += 1
        return self._inner.get_new_notifs()

    def _raise(self, method: str) -> None:
        error = self.errors.get(method)  # once: the test changes them while the agent's thread runs
        if error is not None and self.remaining.get(method, 1):
            if method in self.remaining:
                self.remaining[method] -= 1
            self.counts[method] = self.counts.get(method, 0) + 1
            raise nixl_error(error)


@contextmanager
def failing_agents() -> Iterator[dict[str, FailingAgent]]:
    """Wrap the agent of each backend that is created meanwhile. Yields the agents by worker id."""
    agents: dict[str, FailingAgent] = {}
    create = nixl_backend.new_agent

    def wrapped(name: str) -> FailingAgent:
        agents[name.split("@")[0].split("-")[0]] = agent = FailingAgent(create(name))
        return agent

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nixl_backend, "new_agent", wrapped)
        patch.setattr(nixl_thread, "_DOUBT_POLL_S", 0.01)
        yield agents
