"""Loads a model whose weights are quantised, or become so, without a plain copy of all of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from baton.core.errors import BatonError, ModelError
from baton.model.linear.experts import is_experts
from baton.model.linear.quantise import quantise
from baton.model.linear.weights import GROUP_SIZES, FloatWeight, Weight
from baton.model.loading.gguf.gguf_file import GgufFile
from baton.model.loading.gguf.gguf_source import GgufSource
from baton.model.loading.model_fingerprint import gguf_file
from baton.model.loading.quantised.layouts import layout_of
from baton.model.loading.safetensors_source import SafetensorsSource
from baton.model.loading.skeleton import Coder, WeightPolicy, assign_weights, build_skeleton
from baton.model.loading.text_part import own_name
from baton.model.loading.weight_source import WeightSource
from baton.runtime.logging import get_logger

log = get_logger(__name__)

CODER_BITS = {"int8": 8, "int4": 4}
"""Bits of a code by the setting `weights`."""
CODER_GROUP = {8: 64, 4: 32}
"""Inputs that share a scale when plain weights are quantised, by bits."""
HELD_BITS = 10
"""Bits that a coded weight takes at most while it is loaded: a code in a byte, and factors of groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Settings of loading.

    dtype: of everything that is not coded. weights: the setting. is_text_part: the checkpoint is composite,
    and only its text part is loaded.
    """

    dtype: torch.dtype
    device: torch.device
    weights: str
    is_text_part: bool = False


def is_loaded_by_module(path: Path, config: PreTrainedConfig, weights: str) -> bool:
    """True if a model's weights are quantised, or are to become so. transformers loads all others."""
    is_quantised = getattr(config, "quantization_config", None) is not None
    return weights != "auto" or is_quantised or gguf_file(path) is not None


class PendingModel:
    """A model without weights, and where they will come from."""

    def __init__(
        self, path: Path, model: PreTrainedModel, source: WeightSource, options: LoadOptions, coder: Coder | None
    ) -> None:
        self._path = path
        self._model = model
        self._source = source
        self._options = options
        self._coder = coder
        self._keeps_codes = options.device.type == "cpu"

    def num_bytes(self) -> int:
        """Return the bytes of memory that the weights take while they are loaded, at most."""
        tied = set(self._model.all_tied_weights_keys)
        bits = 0
        for name, parameter in self._model.named_parameters():
            module = name.rpartition(".")[0]
            owner = self._model.get_submodule(module)
            becomes_coded = self._coder is not None and (isinstance(owner, nn.Linear) or is_experts(owner))
            is_coded = parameter.dim() > 1 and (self._source.is_coded(module) or becomes_coded)
            if self._keeps_codes and is_coded:
                bits += HELD_BITS * parameter.numel()
            elif name not in tied:
                bits += 8 * self._options.dtype.itemsize * parameter.numel()
        return bits // 8

    def load(self) -> tuple[PreTrainedModel, str]:
        """Return the model, and a description of its weights. On a GPU coded weights are dequantised.

        Raises ModelError, with the name, if a weight is missing, unreadable, or of another shape.
        """
        options, description = self._options, self._source.description
        policy = WeightPolicy(
            dtype=options.dtype, device=options.device, keeps_codes=self._keeps_codes, coder=self._coder
        )
        try:
            done = assign_weights(self._model, self._source, policy)
        except BatonError as error:
            name = type(self._model).__name__
            raise ModelError(f"{self._path} cannot be loaded as {name}: {error}") from error
        if done.unused:
            log.warning("checkpoint_tensors_unused", number=len(done.unused), first=done.unused[:5])
        if self._coder is not None:
            description = f"{description}, then {options.weights}"
        if done.num_dequantised:
            hint = f"coded weights are kept on a CPU only; here they take {8 * options.dtype.itemsize} bits"
            log.warning("weights_dequantised", number=done.num_dequantised, device=str(options.device), hint=hint)
            description = f"{description}, dequantised"
        log.info("weights_loaded", format=description, num_coded=done.num_coded)
        return self._model, description


@contextmanager
def open_by_module(
    path: Path, model_class: type[PreTrainedModel], config: PreTrainedConfig, options: LoadOptions
) -> Iterator[PendingModel]:
    """Open the weights of a model. Raises ModelError if a file is missing, damaged or not supported."""
    coder = _coder(CODER_BITS[options.weights]) if options.weights in CODER_BITS else None
    if coder is not None and options.device.type != "cpu":
        raise ModelError(f"--weights {options.weights} is for CPUs; on {options.device} use --weights auto")
    model = build_skeleton(model_class, config)
    with _source(path, model, config, is_text_part=options.is_text_part) as source:
        yield PendingModel(path, model, source, options, coder)


@contextmanager
def _source(
    path: Path, model: PreTrainedModel, config: PreTrainedConfig, *, is_text_part: bool
) -> Iterator[WeightSource]:
    file = gguf_file(path)
    if file is not None:
        yield GgufSource(GgufFile(file), config)
        return
    quantization: Any = getattr(config, "quantization_config", None)
    layout = None if quantization is None else layout_of(quantization)
    with SafetensorsSource(path, model, layout, own_name if is_text_part else lambda name: name) as source:
        yield source


def _coder(bits: int) -> Coder:
    def code(name: str, values: torch.Tensor) -> Weight:
        size = next(
            (size for size in reversed(GROUP_SIZES) if size <= CODER_GROUP[bits] and not values.shape[1] % size), None
        )
        if size is None:
            log.warning(
                "weight_not_quantised", name=name, num_inputs=values.shape[1], rule=f"a multiple of {GROUP_SIZES[0]}"
            )
            return FloatWeight(values)
        return quantise(values, bits, size)

    return code
