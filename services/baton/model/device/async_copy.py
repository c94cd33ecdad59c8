"""Copies arrays between host and device without waiting, through pinned memory, in the order of the stream.

A plain copy to a GPU waits for all work launched before it. On a CPU nothing is copied and nothing waits.
"""

from typing import Protocol

import numpy as np
import torch


def upload(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """Return `values` on the device; a GPU copies them when the work launched before has run.

    The caller may overwrite `values` right away, except on a CPU, where the tensor shares their memory.
    """
    tensor = torch.from_numpy(values)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def download(values: torch.Tensor) -> torch.Tensor:
    """Return `values` on the host. The content is valid once a `DeviceEvent` recorded afterwards is
    complete."""
    if values.device.type == "cpu":
        return values
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)


class DeviceEvent(Protocol):
    """A point in the device's queue of work."""

    def is_complete(self) -> bool:
        """True if the device has done all work before this point."""
        ...

    def wait(self) -> None:
        """Wait until the event is complete. Raises torch.AcceleratorError if the device failed before it."""
        ...


class _CompletedEvent:
    def is_complete(self) -> bool:
        return True

    def wait(self) -> None:
        """Return, because a CPU has computed everything when the call returns."""


class _CudaEvent:
    def __init__(self) -> None:
        self._event = torch.cuda.Event(blocking=True)
        self._event.record()

    def is_complete(self) -> bool:
        return self._event.query()

    def wait(self) -> None:
        self._event.synchronize()


def record_event(device: torch.device) -> DeviceEvent:
    """Return an event after all work that the calling thread has given to the device."""
    return _CudaEvent() if device.type == "cuda" else _CompletedEvent()
