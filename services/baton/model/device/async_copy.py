"""Numbers between the host and a device while nobody waits: through pinned memory, in the order of the
device's stream.

A plain copy to a GPU waits for all that was launched before it. On a CPU there is nothing to copy and nothing
to wait for.
"""

from typing import Protocol

import numpy as np
import torch


def upload(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """On the device once what was launched before has run. `values` may be written again at once, unless the
    device is a CPU."""
    tensor = torch.from_numpy(values)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def download(values: torch.Tensor) -> torch.Tensor:
    """On the host once a `Mark` that is made afterwards is reached."""
    if values.device.type == "cpu":
        return values
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)


class Mark(Protocol):
    """A place in what a device has been given to do."""

    def is_reached(self) -> bool: ...

    def wait(self) -> None:
        """Until it is. Raises torch.AcceleratorError if the device failed before."""
        ...


class _Reached:
    def is_reached(self) -> bool:
        return True

    def wait(self) -> None:
        """Nothing is left to do."""


class _CudaMark:
    def __init__(self) -> None:
        self._event = torch.cuda.Event(blocking=True)
        self._event.record()

    def is_reached(self) -> bool:
        return self._event.query()

    def wait(self) -> None:
        self._event.synchronize()


def mark(device: torch.device) -> Mark:
    """Behind all that the calling thread has given to the device."""
    return _CudaMark() if device.type == "cuda" else _Reached()
