"""Joins the matrix products of a decoder's layers for a backend, and frees the model's own weights afterwards."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import nn

from baton.model.forms.decoder_form import DecoderForm, LayerForm, MlpForm

Projection = TypeVar("Projection")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayer(Generic[Projection]):
    """The matrix products of one layer. `Projection` is a backend's matrix product.

    qkv: one projection for queries, keys and values.
    gate_up: one projection for gate and up; None, as is `down`, if the layer has experts.
    """

    form: LayerForm
    qkv: Projection
    o: Projection
    gate_up: Projection | None
    down: Projection | None

    def projections(self) -> list[Projection]:
        """Return those that there are."""
        return [each for each in (self.qkv, self.o, self.gate_up, self.down) if each is not None]


def decoder_layers(form: DecoderForm, make_projection: Callable[..., Projection]) -> list[DecoderLayer[Projection]]:
    """Return the layers of a model. `make_projection`: joins the given linear modules into one projection, with
    their outputs concatenated."""
    return [_layer(layer, make_projection) for layer in form.layers]


def _layer(form: LayerForm, make_projection: Callable[..., Projection]) -> DecoderLayer[Projection]:
    mlp = form.mlp if isinstance(form.mlp, MlpForm) else None
    return DecoderLayer(
        form=form,
        qkv=make_projection(*form.qkv),
        o=make_projection(form.o),
        gate_up=None if mlp is None else make_projection(*mlp.gate_up),
        down=None if mlp is None else make_projection(mlp.down),
    )


def free_weights(modules: Sequence[nn.Module], names: Sequence[str] = ("weight",)) -> None:
    """Replace parameters of modules by empty ones, because a backend holds them packed.

    The model's own code raises afterwards. The empty weights are not on the meta device: oneDNN would compute
    NaN with those, without an error.
    """
    for module in modules:
        for name in names:
            parameter: torch.Tensor = getattr(module, name)
            setattr(module, name, nn.Parameter(parameter.new_empty(0), requires_grad=False))


def joined_bias(modules: Sequence[nn.Module]) -> torch.Tensor | None:
    """Return the biases of modules with one input, concatenated; zeros for those without, None without any."""
    if all(getattr(module, "bias", None) is None for module in modules):
        return None
    return torch.cat(
        [
            module.weight.new_zeros(len(module.weight)) if module.bias is None else module.bias.data  # type: ignore[union-attr,operator,arg-type,misc]
            for module in modules
        ]
    )
