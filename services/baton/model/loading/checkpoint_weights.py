"""Loads a model whose weights are quantised, or become so, without a plain copy of all of them."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from baton.core.errors import BatonError, ModelError
from baton.model.device.kv_tensors import DTYPE_NAMES
from baton.model.linear.experts import is_experts
from baton.model.linear.pack_model import rounds_activations
from baton.model.linear.packer import WeightPacker
from baton.model.linear.quantise import quantise
from baton.model.linear.replace import unify_forms
from baton.model.linear.weight_packing import PANEL
from baton.model.linear.weights import GROUP_SIZES, FloatWeight, Weight
from baton.model.loading.gguf.gguf_file import GgufFile
from baton.model.loading.gguf.gguf_parts import gguf_files
from baton.model.loading.gguf.gguf_source import GgufSource
from baton.model.loading.quantised.layouts import layout_of
from baton.model.loading.safetensors_source import SafetensorsSource
from baton.model.loading.skeleton import DEQUANTISED_BYTES, Coder, WeightPolicy, assign_weights, build_skeleton
from baton.model.loading.text_part import own_name
from baton.model.loading.weight_source import WeightSource
from baton.runtime.logging import get_logger

log = get_logger(__name__)

CODER_BITS = {"int8": 8, "int4": 4}
"""Bits of a code by the setting `weights`."""
CODER_GROUP = {8: 64, 4: 32}
"""Inputs that share a scale when plain weights are quantised, by bits."""
HELD_BITS = 10
"""Bits that a coded weight takes at most before it is packed: a code in a byte, and factors of groups."""

MAX_STORED_BYTES = 4
"""Bytes of a number in a checkpoint: of float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Settings of loading.

    dtype: of everything that is not coded. weights: the setting. packer: packs weights as they are loaded;
    None leaves them as they are. is_text_part: the checkpoint is composite, and only its text part is loaded.
    """

    dtype: torch.dtype
    device: torch.device
    weights: str
    packer: WeightPacker | None = None
    is_text_part: bool = False


def is_loaded_by_module(path: Path, config: PreTrainedConfig, weights: str) -> bool:
    """True if a model's weights are quantised, or are to become so. transformers loads all others."""
    is_quantised = getattr(config, "quantization_config", None) is not None
    return weights != "auto" or is_quantised or bool(gguf_files(path))


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
        """Return the bytes of memory that the weights take while they are loaded, at most.

        Coded weights are packed one by one, so at most one of them is unpacked at a time; or one block of
        experts, of both products. Without a packer all of them stay unpacked. A tied output layer takes
        memory of its own if it is coded and the embedding stays plain.
        """
        tied = set(self._model.all_tied_weights_keys)
        plain_bytes = coder_bits = 0
        unpacked_bits: dict[str, int] = {}
        coder_width = CODER_BITS.get(self._options.weights, 0) + 16 // GROUP_SIZES[0]  # with a factor of 16 bits
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            module = name.rpartition(".")[0]
            owner = self._model.get_submodule(module)
            becomes_coded = self._coder is not None and (isinstance(owner, nn.Linear) or is_experts(owner))
            is_coded = self._keeps_codes and parameter.dim() > 1
            if is_coded and (becomes_coded or self._source.is_coded(module)):
                unpacked_bits[module] = unpacked_bits.get(module, 0) + HELD_BITS * parameter.numel()
                coder_bits += coder_width * _padded_size(parameter) if becomes_coded else 0
            elif name not in tied:
                plain_bytes += self._options.dtype.itemsize * parameter.numel()
        if self._options.packer is None:
            return plain_bytes + sum(unpacked_bits.values()) // 8
        largest_bits = max(unpacked_bits.values(), default=0)
        return plain_bytes + self._source.packed_bytes() + (coder_bits + largest_bits) // 8

    def load(self) -> tuple[PreTrainedModel, str]:
        """Return the model, and a description of its weights. On a GPU coded weights are dequantised.

        Raises ModelError, with the name, if a weight is missing, unreadable, of another shape, or not one of
        the model's, and if there is no memory.
        """
        options, description = self._options, self._source.description
        policy = WeightPolicy(
            dtype=options.dtype,
            device=options.device,
            keeps_codes=self._keeps_codes,
            coder=self._coder,
            packer=options.packer,
        )
        try:
            done = assign_weights(self._model, self._source, policy)
            if done.unused and not self._source.may_have_more:
                raise ModelError(
                    f"{len(done.unused)} of its tensors have no place in this model, the first is {done.unused[0]}; "
                    "give the model's Hugging Face checkpoint instead"
                )
        except (BatonError, OSError) as error:  # OSError: no memory for packed weights
            name = type(self._model).__name__
            raise ModelError(f"{self._path} cannot be loaded as {name}: {error}") from error
        except (IndexError, RuntimeError, TypeError, ValueError) as error:  # tensors of unforeseen shapes or types
            problem = f"{type(error).__name__}: {error}"
            raise ModelError(
                f"{self._path} is damaged, or not in the form that its configuration says ({problem}); "
                "download or copy it again"
            ) from error
        if done.unused:
            log.warning("checkpoint_tensors_unused", number=len(done.unused), first=done.unused[:5])
        if self._coder is not None:
            description = f"{description}, then {options.weights}"
        if done.num_dequantised:
            hint = f"coded weights are kept on a CPU only; here they take {8 * options.dtype.itemsize} bits"
            log.warning("weights_dequantised", number=done.num_dequantised, device=str(options.device), hint=hint)
            description = f"{description}, dequantised"
        activations = DTYPE_NAMES[options.dtype]
        if rounds_activations(self._model):
            activations += ", rounded to 8 bits in products with codes"
            description = f"{description}; products with codes round activations to 8 bits"
        log.info("weights_loaded", format=description, num_coded=done.num_coded, activations=activations)
        return self._model, description

    def host_bytes(self) -> int:
        """Return the bytes of host memory that loading to a GPU takes at most: those of the largest module.

        Its stored form is read whole, or that of all experts of a block, and dequantised some rows at a time.
        """
        sizes: dict[str, int] = {}
        for name, parameter in self._model.named_parameters():
            module = name.rpartition(".")[0]
            sizes[module] = sizes.get(module, 0) + parameter.numel()
        return MAX_STORED_BYTES * max(sizes.values(), default=0) + DEQUANTISED_BYTES


def _padded_size(parameter: torch.Tensor) -> int:
    """Return the number of weights of a matrix, or a stack of them, in full panels."""
    rows = parameter.shape[-2]
    return parameter.numel() // rows * -(-rows // PANEL) * PANEL


@contextmanager
def open_by_module(
    path: Path, model_class: type[PreTrainedModel], config: PreTrainedConfig, options: LoadOptions
) -> Iterator[PendingModel]:
    """Open the weights of a model. Raises ModelError if a file is missing, damaged or not supported."""
    coder = _coder(CODER_BITS[options.weights]) if options.weights in CODER_BITS else None
    if coder is not None and options.device.type != "cpu":
        raise ModelError(f"--weights {options.weights} is for CPUs; on {options.device} use --weights auto")
    try:
        model = build_skeleton(model_class, config, options.dtype)
        transposed = unify_forms(model)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise ModelError(
            f"{path}: no {model_class.__name__} can be made of its configuration ({type(error).__name__}: {error}); "
            "download or copy it again"
        ) from error
    with _source(path, model, config, transposed, is_text_part=options.is_text_part) as source:
        if coder is not None and any(source.is_coded(name) for name, _ in model.named_modules()):
            raise ModelError(
                f"--weights {options.weights} is for plain checkpoints; {path} is quantised already "
                f"({source.description}): use --weights auto"
            )
        yield PendingModel(path, model, source, options, coder)


@contextmanager
def _source(
    path: Path, model: PreTrainedModel, config: PreTrainedConfig, transposed: Collection[str], *, is_text_part: bool
) -> Iterator[WeightSource]:
    if parts := gguf_files(path):
        yield GgufSource(GgufFile(*parts), config)
        return
    quantization: Any = getattr(config, "quantization_config", None)
    layout = None if quantization is None else layout_of(quantization)
    names = own_name if is_text_part else lambda name: name
    with SafetensorsSource(path, model, layout, names, transposed) as source:
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
