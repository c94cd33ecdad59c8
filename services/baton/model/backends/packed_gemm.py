"""Packs weights for the C++ matrix products: single products, and those of a mixture of experts."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from baton.core.errors import LayoutMismatch
from baton.model.backends.decoder_layers import free_weights, joined_bias
from baton.model.forms.decoder_form import ExpertsForm
from baton.model.kernels.cpu.kernel_args import DTYPES, data_address
from baton.model.kernels.cpu.kernel_library import Kernels

PANEL_OUTPUTS = 64
"""Outputs of one packed weight panel; `PANEL` of gemm.h."""
MAX_EXPERTS = 1024
"""Largest number of experts; `MAX_EXPERTS` of experts.h."""


class GemmArgs(ctypes.Structure):
    """ctypes mirror of `GemmArgs` in decoder.cpp."""

    _fields_ = [("packed", ctypes.c_void_p), ("bias", ctypes.c_void_p), ("n", ctypes.c_int64), ("k", ctypes.c_int64)]


class _ExpertsArgs(ctypes.Structure):
    """ctypes mirror of `ExpertsArgs` in decoder.cpp."""

    _fields_ = [
        ("router", GemmArgs),
        *((name, ctypes.c_void_p) for name in ("gate_up", "down")),
        *((name, ctypes.c_int32) for name in ("num_experts", "top_k", "router_weights")),
    ]


class PackedGemm:
    """Product x [rows, k] -> [rows, n] with packed weights; joins the outputs of several modules."""

    def __init__(self, kernels: Kernels, *modules: Any, dtype: torch.dtype | None = None) -> None:
        """`modules`: with bfloat16 or float32 weights and perhaps biases. `dtype`: of the result: that of the
        weights, which is the default, or float32 (not rounded). Raises LayoutMismatch for other dtypes, and in
        bfloat16 if the number of inputs is odd."""
        self._modules: Sequence[nn.Module] = modules
        weight = torch.cat([module.weight.data for module in modules])
        if weight.dtype not in (torch.bfloat16, torch.float32):
            raise LayoutMismatch(f"a product with {weight.dtype} weights: must be bfloat16 or float32")
        self._dtype = dtype or weight.dtype
        self._bias = joined_bias(modules)
        self.n, self.k = weight.shape
        is_bf16 = weight.dtype == torch.bfloat16
        if is_bf16 and self.k % 2:
            raise LayoutMismatch(f"a product with {self.k} inputs: the number of inputs must be even")
        words = -(-self.n // PANEL_OUTPUTS) * PANEL_OUTPUTS * self.k // (2 if is_bf16 else 1)
        self._packed = kernels.weight_arena.take(words)
        self._kernels = kernels
        kernels.pack_weights(
            weight.data_ptr(), self._packed.data_ptr(), self.n, self.k, kernels.num_threads, DTYPES[weight.dtype]
        )
        self.args = GemmArgs(self._packed.data_ptr(), data_address(self._bias), self.n, self.k)

    def release_model_weights(self) -> None:
        """Free the modules' own weights; the packed copy stays."""
        free_weights(self._modules)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply `x`, of the weights' dtype and contiguous."""
        out = x.new_empty(x.shape[0], self.n, dtype=self._dtype)
        self._kernels.gemm(
            x.data_ptr(),
            ctypes.byref(self.args),
            out.data_ptr(),
            x.shape[0],
            self._kernels.num_threads,
            DTYPES[x.dtype],
            DTYPES[self._dtype],
        )
        return out


@dataclass(frozen=True, slots=True)
class _Weights:
    """A weight [n, k] in the place of a linear module."""

    weight: torch.Tensor
    bias: None = None


class PackedExperts:
    """The products of one mixture of experts."""

    def __init__(self, kernels: Kernels, form: ExpertsForm) -> None:
        """Pack the router and all experts. Raises LayoutMismatch for too many experts."""
        experts: Any = form.experts
        self._experts = experts
        num_experts, size = form.router.shape
        if num_experts > MAX_EXPERTS:
            raise LayoutMismatch(f"{num_experts} experts; the kernels take at most {MAX_EXPERTS}")
        self._router = PackedGemm(kernels, _Weights(form.router))
        self._gate_up = [PackedGemm(kernels, _Weights(weight)) for weight in experts.gate_up_proj]
        self._down = [PackedGemm(kernels, _Weights(weight)) for weight in experts.down_proj]
        arrays = [(GemmArgs * num_experts)(*(each.args for each in own)) for own in (self._gate_up, self._down)]
        self._arrays = arrays
        self._args = _ExpertsArgs(
            router=self._router.args,
            gate_up=ctypes.addressof(arrays[0]),
            down=ctypes.addressof(arrays[1]),
            num_experts=num_experts,
            top_k=form.top_k,
            router_weights=int(form.normalised),
        )
        self.address = ctypes.addressof(self._args)
        inner = self._down[0].k
        self.scratch_columns = form.top_k * (size + 3 * inner) + max(form.top_k * size, 2 * num_experts)
        """Elements a token of intermediate results; a logit takes two of them in bfloat16."""

    def release_model_weights(self) -> None:
        """Free the experts' own weights; the packed copies stay."""
        free_weights([self._experts], ("gate_up_proj", "down_proj"))
