"""Joins the matrix products of a decoder's layers for a backend."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

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
    """Return the layers of a model. `make_projection`: joins the given linear modules into one projection,
    with their outputs concatenated."""
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
