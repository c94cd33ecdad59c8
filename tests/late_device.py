"""A device that is behind, as a GPU is: a step that has been launched is said to compute for a while yet."""

import pytest
import torch

from baton.model.step import step_launch

NUM_LOOKS = 20


class LateMark:
    """Reached when it has been looked at often enough, or waited for."""

    def __init__(self) -> None:
        self._looks_left = NUM_LOOKS

    def is_reached(self) -> bool:
        self._looks_left -= 1
        return self._looks_left <= 0

    def wait(self) -> None:
        self._looks_left = 0


def make_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """All executors over torch, from now on."""

    def mark(_device: torch.device) -> LateMark:
        return LateMark()

    monkeypatch.setattr(step_launch, "mark", mark)
