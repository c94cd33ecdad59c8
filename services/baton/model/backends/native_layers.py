"""The decoder that most models are, wholly ours: a step's layers are one call, in which a team of threads
stays awake from the first product to the last norm. In small batches what stands between products took longer
than they did. In the last layer only those tokens that are sampled from are more than keys and values.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from baton.model.attention.attention_inputs import Asked
from baton.model.backends.decoder_layers import decoder_layers, turns
from baton.model.backends.fused_layers import has_onednn_products
from baton.model.backends.native_decoder import NativeDecoder, Product
from baton.model.kernels.cpu.kernel_library import Kernels
from baton.model.step.forward import Forwarded
from baton.model.step.step_inputs import PackedStep


def can_decode(model: PreTrainedModel, kernels: Kernels) -> bool:
    """Whether this is worth it for a model that `can_fuse`: our products are of bfloat16, and oneDNN's are
    faster with AMX. On a processor that does not multiply pairs of it ours are only taken where oneDNN has
    none: torch's own are many times slower there than products of floats. With AVX-512 alone oneDNN emulates
    them; ours were not measured against that."""
    if model.dtype != torch.bfloat16:
        return False
    if kernels.multiplies_pairs:
        return not torch.cpu._is_amx_tile_supported()
    return not has_onednn_products(model.dtype)


class DecoderForward:
    """Implements `Forward`. `kernels` of the threads that a step has."""

    def __init__(self, model: PreTrainedModel, asked: Sequence[Asked], kernels: Kernels) -> None:
        """`model`: one that `can_fuse` and `can_decode`. `asked`: by each layer, see `prove_masks`. The model
        still runs by itself. Raises LayoutMismatch where a product has inputs that are no pairs."""
        base: Any = model.base_model
        self._embedding: torch.Tensor = base.embed_tokens.weight
        self._layers = decoder_layers(model, asked, lambda *modules: Product(kernels, *modules))
        self._decoder = NativeDecoder(
            kernels, self._layers, base.norm.weight, float(cast(Any, model.config).rms_norm_eps)
        )
        # Not rounded: two logits near 8 that bfloat16 tells apart differ by 0.06, twice what else is wrong
        # with them at p99.
        self._head = Product(kernels, cast(nn.Linear, model.lm_head), dtype=torch.float32)
        self._rotary: Any = base.rotary_emb

    def __call__(self, step: PackedStep) -> Forwarded:
        cosine, sine = turns(self._rotary, step.position_ids)
        normed, finite = self._decoder(self._embedding[step.token_ids], step.attention, cosine, sine, step.sample_rows)
        return Forwarded(logits=self._head(normed), finite=finite)

    def own_weights(self) -> None:
        """Take them out of the model, see `take_weights`. What is left to it is the embedding, norms and
        biases. Tied embeddings are held both ways: rows are looked up plain and multiplied packed."""
        self._head.own_weights()
        for layer in self._layers:
            for product in (layer.qkv, layer.o, layer.gate_up, layer.down):
                product.own_weights()

    def close(self) -> None:
        """Nothing was put into the model."""
