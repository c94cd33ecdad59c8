"""Defines the form of a decoder: norms, projections, rotary embedding, activation and multipliers of each
layer.

A layer computes `x += multiplier * norm(attention(norm(x)))`, then the same with its MLP. Any of the four
norms may be absent. `describe_decoder` finds the form of a model; backends build their layers from it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from baton.core.errors import BatonError
from baton.model.attention.attention_inputs import AttentionParams
from baton.model.kernels.layer_values import Gate, HeadNorms, RmsNorm, Rotary


class FormUnknown(BatonError):
    """The model is not a decoder of a known form. The message names the part that differs."""


@dataclass(frozen=True, slots=True)
class RotaryForm:
    """A rotary embedding: angles are position times frequency; cosine and sine are multiplied by `scaling`.

    frequencies: float32 [half].
    """

    frequencies: torch.Tensor
    scaling: float

    def at(self, positions: torch.Tensor) -> Rotary:
        """Return cosine and sine of positions [num_tokens], as the model does, but not rounded to its
        dtype."""
        angles = positions[:, None].float() * self.frequencies[None, :]
        cosine, sine = angles.cos(), angles.sin()
        return Rotary(cosine, sine) if self.scaling == 1.0 else Rotary(cosine * self.scaling, sine * self.scaling)


@dataclass(frozen=True, slots=True)
class QueryScaleForm:
    """Factor of queries that grows with the position: 1 + beta * log(1 + floor(position / period))."""

    beta: float
    period: int

    def at(self, positions: torch.Tensor) -> torch.Tensor:
        """Return float32 [num_tokens]."""
        return 1 + self.beta * torch.log1p(torch.floor(positions.float() / self.period))


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpForm:
    """An MLP: down(activation(gate) * up).

    gate_up: one module with the outputs of gate, then up; or one module for each.
    gate: how they are joined.
    """

    gate_up: tuple[nn.Module, ...]
    down: nn.Module
    gate: Gate


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsForm:
    """A mixture of experts, each a gated MLP.

    module: the model's own code of the whole mixture.
    router, router_bias: weight [num_experts, size] and bias of the logits.
    experts: holds the experts' weights, see `expert_linears`.
    normalised: the weights of the chosen experts sum to one. Otherwise they are a softmax over all experts.
    gate: how an expert joins the halves of its first product.
    """

    module: nn.Module
    router: torch.Tensor
    router_bias: torch.Tensor | None
    experts: nn.Module
    top_k: int
    normalised: bool
    gate: Gate

    @property
    def num_experts(self) -> int:
        """Number of experts."""
        return len(self.router)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerForm:
    """One layer.

    qkv: one module with the outputs of queries, keys and values in this order; or one module for each.
    rotary: index into `DecoderForm.rotaries`, or None if the layer has no rotary embedding.
    multiplier: factor of what attention and MLP add to the hidden states.
    """

    before_attention: RmsNorm | None
    qkv: tuple[nn.Module, ...]
    head_norms: HeadNorms
    rotary: int | None
    attention_params: AttentionParams
    o: nn.Module
    after_attention: RmsNorm | None
    before_mlp: RmsNorm | None
    mlp: MlpForm | ExpertsForm
    after_mlp: RmsNorm | None
    multiplier: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderForm:
    """A whole model.

    dtype: of activations and KV.
    embedding: the model's own module for token ids; its result is multiplied by `embedding_multiplier`.
    head: gives the logits, which are multiplied by `logits_multiplier`, then limited by `softcap` if there is
    one: softcap * tanh(logits / softcap).
    """

    dtype: torch.dtype
    vocab_size: int
    embedding: nn.Module
    embedding_multiplier: float
    layers: tuple[LayerForm, ...]
    rotaries: tuple[RotaryForm, ...]
    query_scale: QueryScaleForm | None
    final_norm: RmsNorm
    head: nn.Module
    logits_multiplier: float
    softcap: float | None

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the first hidden states of tokens, [num_tokens, size]."""
        rows: torch.Tensor = self.embedding(token_ids)
        return rows if self.embedding_multiplier == 1.0 else rows * self.embedding_multiplier

    def finish_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits after multiplier and soft cap. They may be changed in place."""
        if self.logits_multiplier != 1.0:
            logits.mul_(self.logits_multiplier)
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits

    def linear_modules(self) -> Iterator[nn.Module]:
        """Yield all modules that are matrix products, except those of experts."""
        for layer in self.layers:
            yield from layer.qkv
            yield layer.o
            if isinstance(layer.mlp, MlpForm):
                yield from layer.mlp.gate_up
                yield layer.mlp.down
        yield self.head


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": nn.functional.silu,
    "gelu_tanh": lambda x: nn.functional.gelu(x, approximate="tanh"),
    "gelu": nn.functional.gelu,
}
"""Activations of a known form, by name."""
