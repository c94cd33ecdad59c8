"""Multiplies with packed weights of any format; joins the outputs of several linear modules."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from baton.core.errors import LayoutMismatch
from baton.model.kernels.cpu.gemm_args import GemmArgs, PackedWeightArgs
from baton.model.kernels.cpu.kernel_args import DTYPES
from baton.model.kernels.cpu.kernel_library import Kernels
from baton.model.linear.packed_weight import ArenaMemory, PackedWeight, pack_weight
from baton.model.linear.weights import FloatWeight, Weight


class LinearModule(Protocol):
    """Module that can be packed: `nn.Linear`, or one that holds a `Weight`."""

    @property
    def weight(self) -> torch.Tensor | Weight | PackedWeight:
        """The weight [n, k]."""

    @property
    def bias(self) -> torch.Tensor | None:
        """The bias [n], or None."""


@dataclass(frozen=True, slots=True, eq=False)
class LinearPart:
    """A weight and its bias [n]."""

    weight: Weight | PackedWeight
    bias: torch.Tensor | None = None


class PackedGemm:
    """Product x [rows, k] -> [rows, n] with packed weights; joins the outputs of several modules.

    The modules' formats may differ: the value projection of a Q4_K_M checkpoint has codes of 6 bits, those of
    queries and keys 4.

    n, k: numbers of outputs and inputs.
    args: for the C++ products; valid as long as this object lives.
    num_bytes: size of the packed weights in memory.
    """

    def __init__(self, kernels: Kernels, *modules: LinearModule, dtype: torch.dtype | None = None) -> None:
        """Pack the modules' weights; those that are packed already are shared.

        dtype: of the result; None: that of x. Without bfloat16's rounding it is float32. Raises
        LayoutMismatch if the modules have different inputs.
        """
        self._kernels = kernels
        self._dtype = dtype
        self._plain_modules = [module for module in modules if isinstance(module, nn.Linear)]
        parts = [_part_of(module) for module in modules]
        inputs = [part.weight.shape[1] for part in parts]
        if len(set(inputs)) != 1:
            raise LayoutMismatch(f"modules with {inputs} inputs cannot be joined; the numbers must be equal")
        self.n, self.k = sum(part.weight.shape[0] for part in parts), inputs[0]
        self._packed = [_packed(kernels, part.weight, dtype or torch.float32) for part in parts]
        self._biases = [None if part.bias is None else part.bias.detach().float().contiguous() for part in parts]
        each_args = (packed.args(bias) for packed, bias in zip(self._packed, self._biases, strict=True))
        self._weights = (PackedWeightArgs * len(parts))(*each_args)
        self._share_orders()
        self.args = GemmArgs(ctypes.addressof(self._weights), len(parts), self.n, self.k)
        self._row_bytes = {
            x_dtype: int(kernels.gemm_row_bytes(ctypes.byref(self.args), code)) for x_dtype, code in DTYPES.items()
        }

    def _share_orders(self) -> None:
        """Let weights with equal orders of inputs have one, so that rows of x are prepared once for them."""
        known: list[torch.Tensor] = []
        for args, packed in zip(self._weights, self._packed, strict=True):
            if (order := packed.input_order) is not None:
                known.append(next((each for each in known if torch.equal(each, order)), order))
                args.order = known[-1].data_ptr()

    @property
    def num_bytes(self) -> int:
        """Bytes of all packed weights."""
        return sum(packed.num_bytes for packed in self._packed)

    def row_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of scratch that a product needs per row of x in this dtype."""
        return self._row_bytes[dtype]

    def release_model_weights(self) -> None:
        """Free the weights of `nn.Linear` modules; the packed copy stays."""
        free_weights(self._plain_modules)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply `x` [..., k] of float32, bfloat16 or float16. Raises LayoutMismatch for other inputs."""
        if x.shape[-1] != self.k:
            raise LayoutMismatch(f"x has {x.shape[-1]} inputs; the product has {self.k}")
        rows = x.numel() // self.k
        x = x.contiguous()
        out = x.new_empty(*x.shape[:-1], self.n, dtype=self._dtype or x.dtype)
        scratch = torch.empty(rows * self.row_bytes(x.dtype), dtype=torch.uint8)
        self._kernels.gemm(
            ctypes.byref(self.args),
            *(x.data_ptr(), DTYPES[x.dtype]),
            *(out.data_ptr(), DTYPES[out.dtype]),
            *(rows, scratch.data_ptr(), self._kernels.num_threads),
        )
        return out


def _part_of(module: LinearModule) -> LinearPart:
    weight = module.weight
    return LinearPart(FloatWeight(weight.data) if isinstance(weight, torch.Tensor) else weight, module.bias)


def _packed(kernels: Kernels, weight: Weight | PackedWeight, dtype: torch.dtype) -> PackedWeight:
    if isinstance(weight, PackedWeight):
        return weight
    return pack_weight(kernels, weight, ArenaMemory(kernels.weight_arena), dtype)


def free_weights(modules: Sequence[nn.Linear]) -> None:
    """Replace the weights of modules by empty ones, because a backend holds them packed.

    The model's own code raises afterwards. The empty weights are not on the meta device: oneDNN would compute
    NaN with those, without an error.
    """
    for module in modules:
        module.weight = nn.Parameter(module.weight.new_empty(0), requires_grad=False)
