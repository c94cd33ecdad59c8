"""What comes of a decision that its answer need not wait for."""

import asyncio
from collections import deque
from collections.abc import Callable


class DeferredWork:
    """Work put off to the event loop's next turn, done in order. Whoever must find it done calls `catch_up`
    first.

    `at_end`: called once a turn in which there was something, after all of it.
    """

    def __init__(self, at_end: Callable[[], None]) -> None:
        self._at_end = at_end
        self._todo: deque[Callable[[], None]] = deque()
        self._has_turn = False

    def add(self, todo: Callable[[], None]) -> None:
        self._todo.append(todo)
        self.take_turn()

    def take_turn(self) -> None:
        """There is something to do in the next turn, if only `at_end`."""
        if not self._has_turn:
            self._has_turn = True
            asyncio.get_running_loop().call_soon(self._turn)

    def catch_up(self) -> None:
        """One that fails is told of by the event loop: it is nobody's who happens to come next."""
        while self._todo:
            todo = self._todo.popleft()
            try:
                todo()
            except Exception as error:
                asyncio.get_running_loop().call_exception_handler(
                    {"message": "put off, and failed", "exception": error}
                )

    def _turn(self) -> None:
        self._has_turn = False
        self.catch_up()
        self._at_end()
