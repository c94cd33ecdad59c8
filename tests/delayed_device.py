"""Imitates a device that is still computing when a step has been launched, as a GPU is."""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

NUM_POLLS = 20


class DelayedEvent:
    """A device event that is complete after `NUM_POLLS` polls, or once something waits for it.

    Polls count only while `may_end` returns True.
    """

    def __init__(self) -> None:
        self._polls_left = NUM_POLLS
        self.may_end: Callable[[], bool] = lambda: True

    def is_complete(self) -> bool:
        self._polls_left -= self.may_end()
        return self._polls_left <= 0

    def wait(self) -> None:
        self._polls_left = 0


def record_delayed_event(_device: "torch.device") -> DelayedEvent:
    """Take the place of `record_event` in `TorchExecutor`."""
    return DelayedEvent()
