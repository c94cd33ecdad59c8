"""Runs a decoder of a known form entirely in the C++ kernels: all layers of a step are one call.

One team of threads runs from the first product to the last norm. In small batches the work between products
would otherwise take longer than the products. The last layer computes only keys and values for tokens that
are not sampled.
"""

from typing import cast

import torch

from baton.model.backends.decoder_layers import decoder_layers
from baton.model.backends.fused_layers import has_onednn_bf16_gemm
from baton.model.backends.native_decoder import NativeDecoder
from baton.model.forms.decoder_form import DecoderForm
from baton.model.kernels.cpu.kernel_library import Kernels, load_kernels
from baton.model.linear.packed_linear import LinearModule, PackedGemm
from baton.model.linear.packer import PackerForDtype, WeightPacker
from baton.model.linear.product_choice import native_gemm_is_faster
from baton.model.linear.product_speed import native_is_faster_here
from baton.model.step.forward import ForwardOutput
from baton.model.step.step_inputs import PackedStep


def prefers_native_gemm(dtype: torch.dtype, kernels: Kernels) -> bool:
    """True if the native GEMM is expected to be faster on this processor than torch's."""
    return native_gemm_is_faster(
        dtype,
        has_bf16_dot=kernels.has_bf16_dot,
        has_amx=torch.cpu._is_amx_tile_supported(),
        has_onednn_gemm=has_onednn_bf16_gemm(dtype),
    )


def new_packer(kernels: Kernels, dtype: torch.dtype) -> WeightPacker:
    """Return a packer for the weights of a model of this dtype, without measuring products."""
    return WeightPacker(kernels, dtype=dtype, native_is_faster=prefers_native_gemm(dtype, kernels))


def packer_at_loading(num_threads: int) -> PackerForDtype:
    """Return a function that makes the packer with which a model is loaded for a CPU.

    In float32 the products are measured. It returns None if the kernels cannot be loaded; the selection of
    the backend logs the reason.
    """

    def packer(dtype: torch.dtype) -> WeightPacker | None:
        try:
            kernels = load_kernels(num_threads)
        except Exception:  # compiler, linker and loader fail in many ways; the backend's selection logs them
            return None
        is_faster = prefers_native_gemm(dtype, kernels)
        if dtype == torch.float32:
            is_faster = native_is_faster_here(kernels, dtype)
        return WeightPacker(kernels, dtype=dtype, native_is_faster=is_faster)

    return packer


class DecoderForward:
    """Implements `Forward` for a decoder of a known form with the native GEMM and kernels."""

    def __init__(self, form: DecoderForm, kernels: Kernels) -> None:
        """`form`: of a model whose own code still works afterwards. `kernels`: with the number of threads of
        a step. Raises LayoutMismatch if a product cannot be packed."""
        self._form = form
        self._layers = decoder_layers(form, lambda *modules: PackedGemm(kernels, *modules))
        self._decoder = NativeDecoder(kernels, form, self._layers)
        # Logits stay float32. Neighbouring bfloat16 values near 8 differ by 0.06, twice the p99 of all other
        # errors.
        self._head = PackedGemm(kernels, cast(LinearModule, form.head), dtype=torch.float32)

    def __call__(self, step: PackedStep) -> ForwardOutput:
        form, positions = self._form, step.position_ids
        rotaries = [rotary.at(positions) for rotary in form.rotaries]
        query_scale = None if form.query_scale is None else form.query_scale.at(positions)
        hidden = form.embed(step.token_ids)
        normed, finite = self._decoder(hidden, step.attention, rotaries, query_scale, step.sample_rows)
        return ForwardOutput(logits=form.finish_logits(self._head(normed)), finite=finite)

    def release_model_weights(self) -> None:
        """Free the model's projection weights, see `free_weights`; its own code then raises.

        The model keeps the embedding, norms and biases, and every weight that was packed before.
        """
        self._head.release_model_weights()
        self._decoder.release_model_weights()
        for layer in self._layers:
            for projection in layer.projections():
                projection.release_model_weights()

    def close(self) -> None:
        """Do nothing: this pass installs nothing in the model."""
