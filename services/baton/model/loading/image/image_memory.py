"""Places packed weights in a file that is being written, and in the process's own memory if that fails."""

from collections.abc import Callable

import numpy as np

from baton.model.linear.packed_weight import PlacedBytes, WeightMemory
from baton.model.loading.image.image_file import Bytes, ImageWriter, Section


class ImageMemory:
    """Implements `WeightMemory`.

    problem: why not all weights are in the file; None if they are.
    """

    def __init__(self, writer: ImageWriter, fallback: WeightMemory) -> None:
        """fallback: for the weights that the file has no space for."""
        self.problem: OSError | None = None
        self._writer = writer
        self._fallback = fallback
        self._sections: dict[int, Section] = {}
        self._scratch = np.empty(0, np.uint8)

    def place(self, num_bytes: int, fill: Callable[[int], None]) -> PlacedBytes:
        if self.problem is None:
            if len(self._scratch) < num_bytes:
                self._scratch = np.empty(num_bytes, np.uint8)  # reused: page faults take as long as packing
            fill(self._scratch.ctypes.data)
            try:
                data = self.write(self._scratch[:num_bytes])[1]
                return PlacedBytes(data.ctypes.data, num_bytes, data)
            except OSError as error:
                self.problem = error
        return self._fallback.place(num_bytes, fill)

    def write(self, data: Bytes) -> tuple[Section, Bytes]:
        """Write bytes, and return where they are and the same bytes as mapped memory. Raises OSError."""
        section = self._writer.append(data)
        mapped = self._writer.mapped(section)
        self._sections[mapped.ctypes.data] = section
        return section, mapped

    def section_at(self, address: int) -> Section | None:
        """Return the section whose mapped memory begins at an address; None if there is none."""
        return self._sections.get(address)
