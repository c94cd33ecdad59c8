"""Packs the products of a mixture of experts for the C++ decoder."""

import ctypes
from typing import Any

import torch
from torch import nn

from baton.core.errors import LayoutMismatch
from baton.model.forms.decoder_form import ExpertsForm
from baton.model.kernels.cpu.gemm_args import GemmArgs
from baton.model.kernels.cpu.kernel_library import Kernels
from baton.model.linear.packed_linear import LinearPart, PackedGemm
from baton.model.linear.weights import FloatWeight

MAX_EXPERTS = 1024
"""Largest number of experts; `MAX_EXPERTS` of experts.h."""
_PARAMETERS = ("gate_up_proj", "down_proj")


class _ExpertsArgs(ctypes.Structure):
    """ctypes mirror of `ExpertsArgs` in decoder.cpp."""

    _fields_ = [
        ("router", GemmArgs),
        *((name, ctypes.c_void_p) for name in ("gate_up", "down")),
        *((name, ctypes.c_int32) for name in ("num_experts", "top_k", "router_weights")),
    ]


class PackedExperts:
    """The products of one mixture of experts. All experts have weights of one format.

    address: of the arguments for the C++ decoder; valid as long as this object lives.
    """

    def __init__(self, kernels: Kernels, form: ExpertsForm) -> None:
        """Pack the router and all experts. Raises LayoutMismatch for too many experts."""
        self._experts: Any = form.experts
        num_experts, size = form.router.shape
        if num_experts > MAX_EXPERTS:
            raise LayoutMismatch(f"{num_experts} experts; the kernels take at most {MAX_EXPERTS}")
        self._router = _packed(kernels, form.router)
        self._gate_up, self._down = (
            [_packed(kernels, weight) for weight in getattr(self._experts, name)] for name in _PARAMETERS
        )
        self._arrays = [(GemmArgs * num_experts)(*(each.args for each in own)) for own in (self._gate_up, self._down)]
        self._args = _ExpertsArgs(
            router=self._router.args,
            gate_up=ctypes.addressof(self._arrays[0]),
            down=ctypes.addressof(self._arrays[1]),
            num_experts=num_experts,
            top_k=form.top_k,
            router_weights=int(form.normalised),
        )
        self.address = ctypes.addressof(self._args)
        self._top_k = form.top_k
        inner = self._down[0].k
        self.scratch_columns = form.top_k * (size + 3 * inner) + max(form.top_k * size, 2 * num_experts)
        """Elements a token of intermediate results; a logit takes two of them in half precision."""

    def row_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of scratch that the largest product needs per token, for activations of
        `dtype`."""
        of_experts = max(self._gate_up[0].row_bytes(dtype), self._down[0].row_bytes(dtype))
        return max(self._router.row_bytes(dtype), self._top_k * of_experts)

    def release_model_weights(self) -> None:
        """Free the experts' own weights; the packed copies stay."""
        for name in _PARAMETERS:
            empty = getattr(self._experts, name).new_empty(0)
            setattr(self._experts, name, nn.Parameter(empty, requires_grad=False))


def _packed(kernels: Kernels, weight: torch.Tensor) -> PackedGemm:
    return PackedGemm(kernels, LinearPart(FloatWeight(weight.detach())))
