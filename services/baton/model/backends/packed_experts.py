"""Packs the products of a mixture of experts for the C++ decoder."""

import ctypes

import torch

from baton.core.errors import LayoutMismatch
from baton.model.forms.decoder_form import ExpertsForm
from baton.model.kernels.cpu.gemm_args import GemmArgs
from baton.model.kernels.cpu.kernel_library import Kernels
from baton.model.linear.experts import DOWN, GATE_UP, expert_linears, release_experts
from baton.model.linear.packed_linear import LinearPart, PackedGemm
from baton.model.linear.weights import FloatWeight

MAX_EXPERTS = 1024
"""Largest number of experts; `MAX_EXPERTS` of experts.h."""


class _ExpertsGemmArgs(ctypes.Structure):
    """ctypes mirror of `ExpertsGemmArgs` in experts.h."""

    _fields_ = [("experts", ctypes.c_void_p), ("row_bytes", ctypes.c_int64)]


class _ExpertsArgs(ctypes.Structure):
    """ctypes mirror of `ExpertsArgs` in decoder.cpp."""

    _fields_ = [
        ("router", GemmArgs),
        *((name, _ExpertsGemmArgs) for name in ("gate_up", "down")),
        *((name, ctypes.c_int32) for name in ("num_experts", "top_k", "router_weights")),
    ]


class _ExpertsGemm:
    """One product of all experts, of one shape, each with its own format.

    n, k, args: of `PackedGemm`, for all experts together.
    """

    def __init__(self, kernels: Kernels, form: ExpertsForm, name: str, dtype: torch.dtype) -> None:
        linears = [expert_linears(form.experts, name, expert) for expert in range(form.num_experts)]
        shapes = {tuple(linear.weight.shape for linear in own) for own in linears}
        if len(shapes) != 1:
            raise LayoutMismatch(f"{name} of experts has the shapes {sorted(shapes)}; must be one")
        self._packed = [PackedGemm(kernels, *own) for own in linears]
        self._array = (GemmArgs * form.num_experts)(*(each.args for each in self._packed))
        self.n, self.k = self._packed[0].n, self._packed[0].k
        self.row_bytes = max(each.row_bytes(dtype) for each in self._packed)
        self.args = _ExpertsGemmArgs(ctypes.addressof(self._array), self.row_bytes)


class PackedExperts:
    """The products of one mixture of experts.

    address: of the arguments for the C++ decoder; valid as long as this object lives.
    scratch_columns: elements a token of intermediate results, see `Scratch` of decoder.cpp.
    row_bytes: bytes of scratch that the largest product needs per token.
    """

    def __init__(self, kernels: Kernels, form: ExpertsForm, dtype: torch.dtype) -> None:
        """Pack the router and all experts. dtype: of activations.

        Raises LayoutMismatch for too many experts, or experts of different shapes.
        """
        self._experts = form.experts
        num_experts, top_k = form.num_experts, form.top_k
        if num_experts > MAX_EXPERTS:
            raise LayoutMismatch(f"{num_experts} experts; the kernels take at most {MAX_EXPERTS}")
        self._router = PackedGemm(kernels, LinearPart(FloatWeight(form.router.detach()), form.router_bias))
        self._gate_up, self._down = (_ExpertsGemm(kernels, form, name, dtype) for name in (GATE_UP, DOWN))
        self._args = _ExpertsArgs(
            router=self._router.args,
            gate_up=self._gate_up.args,
            down=self._down.args,
            num_experts=num_experts,
            top_k=top_k,
            router_weights=int(form.normalised),
        )
        self.address = ctypes.addressof(self._args)
        size, inner = self._router.k, self._down.k
        # a logit takes two elements in half precision, and shares memory with the outputs
        self.scratch_columns = top_k * (size + 3 * inner) + max(top_k * size, 2 * num_experts)
        of_experts = max(self._gate_up.row_bytes, self._down.row_bytes)
        self.row_bytes = max(self._router.row_bytes(dtype), top_k * of_experts)

    def release_model_weights(self) -> None:
        """Free the experts' own weights; the packed copies stay."""
        release_experts(self._experts)
