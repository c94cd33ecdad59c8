"""The weight formats of the benchmark `engine`, and which systems run each of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from baton.model.loading.gguf.gguf_file import GgufFile
from baton.model.loading.gguf.gguf_parts import part_paths
from bench.support.engine.engine_cells import CELLS_BY_NAME
from bench.support.roofline import Needs
from bench.systems.engines import ALONE, BATON, LLAMA, TRANSFORMERS, VLLM, VLLM_FLOAT32

SYSTEM_NAMES = (BATON, ALONE, LLAMA, VLLM, VLLM_FLOAT32, TRANSFORMERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFormat:
    """A format of weights.

    baton_weights: Baton's setting `weights`.
    llama_type: type that `llama-quantize` writes; empty for the file that was exported or given.
    is_pure: True if all matrices get this type. Otherwise `llama-quantize` gives the output layer, which is
        often the embedding, too, more bits: 6.6 instead of 4.5 with Q4_0.
    bits: of a weight in Baton, factors included; None if only the file's size says it.
    shares_file: True if Baton loads llama.cpp's file.
    systems: that run this format.
    """

    baton_weights: str = "auto"
    llama_type: str = ""
    is_pure: bool = False
    bits: float | None = None
    shares_file: bool = False
    systems: tuple[str, ...] = (BATON, ALONE, LLAMA)


LONGEST_GENERATED = 64
BF16, FILE = "bf16", "file"
FORMATS: Mapping[str, EngineFormat] = {
    BF16: EngineFormat(bits=16, systems=SYSTEM_NAMES),
    "int8": EngineFormat(baton_weights="int8", llama_type="Q8_0", is_pure=True, bits=8.25),
    "int4": EngineFormat(baton_weights="int4", llama_type="Q4_0", is_pure=True, bits=4.5),
    "q4_k_m": EngineFormat(llama_type="Q4_K_M", shares_file=True),
    FILE: EngineFormat(shares_file=True),
}
"""By name. `file` is a GGUF file that `--model` names."""


@dataclass(frozen=True, slots=True)
class Contestant:
    """One system with weights of one format."""

    system: str
    format: str

    @property
    def name(self) -> str:
        return f"{self.system}, {self.format}"


def contestants(format_name: str, systems: Sequence[str] = SYSTEM_NAMES) -> list[Contestant]:
    """Return what runs side by side for a format: the chosen systems and, for their ratios, the same in bf16.

    The bf16 references are Baton's engine without gateway, and llama.cpp. A file has no bf16 form.
    """
    own = [Contestant(system, format_name) for system in FORMATS[format_name].systems if system in systems]
    if format_name in (BF16, FILE):
        return own
    return own + [Contestant(system, BF16) for system in (ALONE, LLAMA) if system in systems]


def wanted(cells: Sequence[str], running: Sequence[Contestant]) -> list[tuple[str, str]]:
    """Return the cells and contestants to measure, without long answers of `generate`: they take minutes."""
    return [
        (cell, contestant.name)
        for cell in cells
        for contestant in running
        if contestant.system != TRANSFORMERS or CELLS_BY_NAME[cell].num_outputs <= LONGEST_GENERATED
    ]


def needs_of(directory: Path, format_name: str, file: Path | None) -> Needs:
    """Return what a model needs with weights of a format.

    directory: with the configuration, and for formats other than `file` with the weights in bfloat16.
    file: the GGUF file, for formats that only it describes.
    """
    bits = FORMATS[format_name].bits
    if bits is not None:
        return replace(Needs.of(directory), weight_bits=bits)
    if file is None:
        raise ValueError(f"the bits of {format_name} weights are those of a file; none is given")
    return needs_of_file(directory, file)


def needs_of_file(directory: Path, file: Path) -> Needs:
    """Return what a model needs with the weights of a GGUF file, whose types may differ."""
    params, read_bytes = file_weights(file)
    needs = Needs.of(directory, params)
    return replace(needs, weight_bits=8 * read_bytes / needs.weight_params)


def file_weights(file: Path) -> tuple[int, int]:
    """Return the number of weights in a GGUF file, all its parts, and the bytes that a decode step reads."""
    tensors = GgufFile(*part_paths(file)).tensors
    is_tied = "output.weight" not in tensors
    read = [tensor.num_bytes for name, tensor in tensors.items() if is_tied or name != "token_embd.weight"]
    return sum(prod(tensor.shape) for tensor in tensors.values()), sum(read)
