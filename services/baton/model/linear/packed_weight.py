"""Holds a weight in the layout of the C++ products, and reads its rows back."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from baton.model.kernels.cpu.gemm_args import PackedWeightArgs, UnpackedWeightArgs, WeightFormat
from baton.model.kernels.cpu.kernel_args import data_address
from baton.model.kernels.cpu.kernel_library import Kernels, WeightArena
from baton.model.linear.weight_packing import CODED, packing_source
from baton.model.linear.weights import FloatWeight, Weight, in_input_order, require_order


@dataclass(frozen=True, slots=True, eq=False)
class PlacedBytes:
    """Memory of one packed weight. It stays as it is while `owner` lives."""

    address: int
    num_bytes: int
    owner: object


class WeightMemory(Protocol):
    """Gives packed weights their place: memory of this process, or a file that processes share."""

    def place(self, num_bytes: int, fill: Callable[[int], None]) -> PlacedBytes:
        """Return memory that `fill` has written, given its address. Raises OSError if there is none."""
        ...


class ArenaMemory:
    """Implements `WeightMemory` with huge pages of this process."""

    def __init__(self, arena: WeightArena) -> None:
        self._arena = arena

    def place(self, num_bytes: int, fill: Callable[[int], None]) -> PlacedBytes:
        words = self._arena.take(-(-num_bytes // 4))
        fill(words.data_ptr())
        return PlacedBytes(words.data_ptr(), num_bytes, words)


class PackedWeight:
    """A weight [n, k] in the layout of the C++ products.

    shape: (n, k). format: see weight_format.h. memory: where it lies.
    dtype, device: those of activations. Some models' own code asks a weight for them.
    input_order: see `CodedWeight`.
    """

    def __init__(
        self,
        kernels: Kernels,
        weight_format: WeightFormat,
        shape: tuple[int, int],
        memory: PlacedBytes,
        dtype: torch.dtype,
        input_order: torch.Tensor | None = None,
    ) -> None:
        self.kernels = kernels
        self.format = weight_format
        self.shape = shape
        self.memory = memory
        self.dtype, self.device = dtype, torch.device("cpu")
        if input_order is not None:
            require_order(input_order, shape[1])
        self.input_order = input_order
        self._args = self.args()

    @property
    def num_bytes(self) -> int:
        """Size in memory."""
        return self.memory.num_bytes

    @property
    def is_coded(self) -> bool:
        """True if products round activations to 8 bits."""
        return bool(self.format.kind == CODED)

    def args(self, bias: torch.Tensor | None = None) -> PackedWeightArgs:
        """Return arguments for the C++ products. This object and `bias` [n], float32, must stay alive."""
        n, k = self.shape
        return PackedWeightArgs(
            packed=self.memory.address,
            bias=data_address(bias),
            order=data_address(self.input_order),
            n=n,
            k=k,
            format=self.format,
        )

    def rows(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return the weights of some outputs as float32 [len(outputs), k], bit for bit as they were packed.

        Columns are in the order of the inputs. outputs: integers. Raises IndexError if one is not below n.
        """
        outputs = outputs.to(torch.int64).contiguous()
        found = torch.empty(len(outputs), self.shape[1])
        exist = self.kernels.unpack_rows(
            *(ctypes.byref(self._args), outputs.data_ptr(), len(outputs)),
            *(found.data_ptr(), self.kernels.num_threads),
        )
        if not exist:
            raise IndexError(f"outputs {int(outputs.min())} to {int(outputs.max())}; must be below {self.shape[0]}")
        return in_input_order(found, self.input_order)


def pack_weight(kernels: Kernels, weight: Weight, memory: WeightMemory, dtype: torch.dtype) -> PackedWeight:
    """Pack a weight without loss. `dtype`: of activations. Raises OSError if there is no memory."""
    source = packing_source(weight)
    n, k = weight.shape
    args = PackedWeightArgs(n=n, k=k, format=source.format)
    unpacked = UnpackedWeightArgs(
        values=source.values.data_ptr(),
        scale_supers=data_address(source.scales.supers),
        scale_codes=data_address(source.scales.codes),
        offset_supers=data_address(source.offsets.supers),
        offset_codes=data_address(source.offsets.codes),
    )

    def fill(address: int) -> None:
        kernels.pack_weights(ctypes.byref(args), ctypes.byref(unpacked), address, kernels.num_threads)

    num_bytes: int = kernels.packed_bytes(ctypes.byref(args))
    order = None if isinstance(weight, FloatWeight) else weight.input_order
    return PackedWeight(kernels, source.format, (n, k), memory.place(num_bytes, fill), dtype, order)
