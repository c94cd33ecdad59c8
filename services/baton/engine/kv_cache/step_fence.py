"""The idle blocks that a step in flight may still access, and which must therefore not be reallocated."""

from collections import OrderedDict
from collections.abc import KeysView, Set

from baton.engine.state.require import require


class StepFence:
    """Counts the steps in flight, and fences blocks that become idle until these steps have finished."""

    def __init__(self) -> None:
        self._num_launched = 0
        self._num_finished = 0
        self._last_step: OrderedDict[int, int] = OrderedDict()  # block -> last step that may use it, oldest first

    @property
    def blocks(self) -> KeysView[int]:
        """The fenced blocks."""
        return self._last_step.keys()

    def add(self, block_id: int) -> None:
        """Fence a block that has become idle. Does nothing if no step is in flight."""
        if self._num_launched > self._num_finished:
            self._last_step[block_id] = self._num_launched

    def remove(self, block_id: int) -> None:
        """Lift the fence of a block that is in use again."""
        self._last_step.pop(block_id, None)

    def step_launched(self) -> None:
        """Record that a step was given to the device."""
        self._num_launched += 1

    def step_withdrawn(self) -> None:
        """Record that the step that was launched last was not run, or has ended without result."""
        self._require_step()
        self._num_launched -= 1
        for block_id, last_step in self._last_step.items():
            self._last_step[block_id] = min(last_step, self._num_launched)
        self._lift()

    def step_finished(self) -> None:
        """Record that the oldest step in flight has ended on the device."""
        self._require_step()
        self._num_finished += 1
        self._lift()

    def check(self, idle: Set[int]) -> None:
        """Check all invariants. `idle` are the blocks that are not in use. Raises AssertionError."""
        require(self._last_step.keys() <= idle, "a block in use is fenced")
        require(
            not self._last_step or self._num_launched > self._num_finished,
            "a block is fenced and no step is in flight",
        )

    def _require_step(self) -> None:
        if self._num_finished == self._num_launched:
            raise ValueError("no step is in flight")

    def _lift(self) -> None:
        while self._last_step and next(iter(self._last_step.values())) <= self._num_finished:
            self._last_step.popitem(last=False)
