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
from baton.model.kernels.cpu.kernel_library import Kernels
from baton.model.linear.packed_linear import LinearModule, PackedGemm
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


def native_gemm_is_faster(dtype: torch.dtype, *, has_bf16_dot: bool, has_amx: bool, has_onednn_gemm: bool) -> bool:
    """True if the native GEMM is expected to be faster than torch's.

    `has_bf16_dot`: the processor and the kernels support AVX512-BF16. `has_onednn_gemm`: oneDNN has a GEMM on
    packed bfloat16 weights.

    With AMX, oneDNN is faster. Without AVX512-BF16, the native GEMM is used only if oneDNN has none: torch's
    fallback is many times slower than float32. oneDNN emulates bfloat16 on plain AVX-512; the native GEMM was
    not measured against that. In float32 torch's products were not measured against it, either, and need no
    second copy of the weights.
    """
    if dtype != torch.bfloat16:
        return False
    return not has_amx if has_bf16_dot else not has_onednn_gemm


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

        The model keeps the embedding, norms and biases. Tied embeddings are held twice: plain for look-up and
        packed for the product.
        """
        self._head.release_model_weights()
        self._decoder.release_model_weights()
        for layer in self._layers:
            for projection in layer.projections():
                projection.release_model_weights()

    def close(self) -> None:
        """Do nothing: this pass installs nothing in the model."""
