"""Runs the plain decoder entirely in the C++ kernels: all layers of a step are one call.

One team of threads runs from the first product to the last norm. In small batches the work between products
would otherwise take longer than the products. The last layer computes only keys and values for tokens that
are not sampled.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from baton.model.attention.attention_inputs import AttentionParams
from baton.model.backends.decoder_layers import decoder_layers, rope_cos_sin
from baton.model.backends.fused_layers import has_onednn_bf16_gemm
from baton.model.backends.native_decoder import NativeDecoder
from baton.model.kernels.cpu.kernel_library import Kernels
from baton.model.linear.packed_linear import PackedGemm
from baton.model.step.forward import ForwardOutput
from baton.model.step.step_inputs import PackedStep


def prefers_native_gemm(model: PreTrainedModel, kernels: Kernels) -> bool:
    """True if the native GEMM is expected to be faster on this processor than torch's, for a model that
    `is_plain_decoder`."""
    return native_gemm_is_faster(
        model.dtype,
        has_bf16_dot=kernels.has_bf16_dot,
        has_amx=torch.cpu._is_amx_tile_supported(),
        has_onednn_gemm=has_onednn_bf16_gemm(model.dtype),
    )


def native_gemm_is_faster(dtype: torch.dtype, *, has_bf16_dot: bool, has_amx: bool, has_onednn_gemm: bool) -> bool:
    """True if the native GEMM, which is for bfloat16 only, is expected to be faster than torch's.

    `has_bf16_dot`: the processor and the kernels support AVX512-BF16. `has_onednn_gemm`: oneDNN has a GEMM on
    packed bfloat16 weights.

    With AMX, oneDNN is faster. Without AVX512-BF16, the native GEMM is used only if oneDNN has none: torch's
    fallback is many times slower than float32. oneDNN emulates bfloat16 on plain AVX-512; the native GEMM was
    not measured against that.
    """
    if dtype != torch.bfloat16:
        return False
    return not has_amx if has_bf16_dot else not has_onednn_gemm


class DecoderForward:
    """Implements `Forward` for the plain bfloat16 decoder with the native GEMM and kernels."""

    def __init__(self, model: PreTrainedModel, attention_params: Sequence[AttentionParams], kernels: Kernels) -> None:
        """`model`: one for which `is_plain_decoder` and `prefers_native_gemm` are true; its own code still
        works. `attention_params`: one per layer, from `verify_masks`. `kernels`: with the number of threads
        of a step."""
        base: Any = model.base_model
        self._embedding: torch.Tensor = base.embed_tokens.weight
        self._layers = decoder_layers(model, attention_params, lambda *modules: PackedGemm(kernels, *modules))
        self._decoder = NativeDecoder(
            kernels, self._layers, base.norm.weight, float(cast(Any, model.config).rms_norm_eps)
        )
        # Logits stay float32. Neighbouring bfloat16 values near 8 differ by 0.06, twice the p99 of all other
        # errors.
        self._head = PackedGemm(kernels, cast(nn.Linear, model.lm_head), dtype=torch.float32)
        self._rotary: Any = base.rotary_emb

    def __call__(self, step: PackedStep) -> ForwardOutput:
        cosine, sine = rope_cos_sin(self._rotary, step.position_ids)
        normed, finite = self._decoder(self._embedding[step.token_ids], step.attention, cosine, sine, step.sample_rows)
        return ForwardOutput(logits=self._head(normed), finite=finite)

    def release_model_weights(self) -> None:
        """Free the model's projection weights, see `free_weights`; its own code then raises.

        The model keeps the embedding, norms and biases. Tied embeddings are held twice: plain for look-up and
        packed for the product.
        """
        self._head.release_model_weights()
        for layer in self._layers:
            for projection in (layer.qkv, layer.o, layer.gate_up, layer.down):
                projection.release_model_weights()

    def close(self) -> None:
        """Do nothing: this pass installs nothing in the model."""
