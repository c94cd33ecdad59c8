"""Reads GGUF files that are written byte by byte, and refuses damaged ones by name."""

import struct
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.core.errors import ModelError
from baton.model.loading.gguf.gguf_config import LONGROPE_TENSORS, gguf_config
from baton.model.loading.gguf.gguf_file import GgufFile
from baton.model.loading.gguf.gguf_metadata import GgufMetadata

SCALARS = {bool: (7, "<?"), int: (4, "<I"), float: (6, "<f")}


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def value_bytes(value: Any) -> bytes:
    """Return the type and the bytes of a metadata value."""
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    if isinstance(value, list):
        inner = b"".join(value_bytes(each)[4:] for each in value)
        return struct.pack("<IIQ", 9, struct.unpack("<I", value_bytes(value[0])[:4])[0], len(value)) + inner
    kind, form = SCALARS[type(value)]
    return struct.pack("<I", kind) + struct.pack(form, value)


def tensor_row(name: str, shape: tuple[int, ...], type_id: int, offset: int) -> bytes:
    sizes = tuple(reversed(shape))
    return text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, type_id, offset)


def file_bytes(
    metadata: Mapping[str, Any] | None = None,
    rows: bytes | None = None,
    *,
    version: int = 3,
    num_tensors: int = 1,
    num_metadata: int | None = None,
    data: bytes = bytes(range(64)),
) -> bytes:
    metadata = {"general.architecture": "llama"} if metadata is None else metadata
    content = struct.pack(
        "<4sIQQ", b"GGUF", version, num_tensors, len(metadata) if num_metadata is None else num_metadata
    )
    for key, value in metadata.items():
        content += text(key) + value_bytes(value)
    content += tensor_row("a.weight", (4, 4), 0, 0) if rows is None else rows
    return content + bytes(-len(content) % 32) + data


@pytest.fixture
def read(tmp_path: Path) -> Callable[[bytes], GgufFile]:
    def write_and_read(content: bytes) -> GgufFile:
        (tmp_path / "m.gguf").write_bytes(content)
        return GgufFile(tmp_path / "m.gguf")

    return write_and_read


def test_metadata_and_tensors_are_read(read: Callable[[bytes], GgufFile]) -> None:
    metadata = {"general.architecture": "llama", "flag": True, "ids": [1, 2, 3], "names": ["a", "é"], "x": 0.5, "n": 7}
    rows = tensor_row("b", (2, 3), 1, 0) + tensor_row("a.weight", (12,), 0, 32)
    data = torch.arange(6).half().numpy().tobytes() + bytes(20) + torch.arange(12).float().numpy().tobytes()
    file = read(file_bytes(metadata, rows, num_tensors=2, data=data))
    assert file.metadata == metadata
    assert [(entry.shape, entry.type_id) for entry in file.tensors.values()] == [((2, 3), 1), ((12,), 0)]
    assert file.raw(file.tensors["b"]).view(torch.float16).tolist() == [0, 1, 2, 3, 4, 5]
    assert file.raw(file.tensors["a.weight"]).view(torch.float32).tolist() == list(range(12))


def test_every_cut_of_a_file_is_refused(read: Callable[[bytes], GgufFile]) -> None:
    metadata = {"general.architecture": "llama", "names": ["a", "bc"], "ids": [1, 2], "x": 0.5}
    whole = file_bytes(metadata)
    read(whole)
    for length in range(len(whole)):
        with pytest.raises(ModelError, match=r"m\.gguf"):
            read(whole[:length])


HUGE = 1 << 62


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"GGML" + file_bytes()[4:], "begins with b'GGML'"),
        (file_bytes(version=1), "version is 1"),
        (file_bytes(version=3 << 24), "big-endian"),
        (file_bytes(num_tensors=HUGE), "number of tensors"),
        (file_bytes(num_metadata=HUGE), "number of metadata values"),
        (
            file_bytes({"general.architecture": "llama", "a": "x"}).replace(text("x"), struct.pack("<Q", HUGE)),
            "length of",
        ),
        (file_bytes({"a": [1, 2]}).replace(struct.pack("<IQ", 4, 2), struct.pack("<IQ", 4, HUGE)), "length of 'a'"),
        (file_bytes({"a": [1, 2]}).replace(struct.pack("<IQ", 4, 2), struct.pack("<IQ", 4, 1 << 23)), "are left"),
        (file_bytes({"a": ["x"]}).replace(struct.pack("<IQ", 8, 1), struct.pack("<IQ", 8, 1 << 23)), "are left"),
        (file_bytes({"a": [1, 2]}).replace(struct.pack("<IQ", 4, 2), struct.pack("<IQ", 9, 2)), "unsupported type 9"),
        (file_bytes({"a": 1}).replace(value_bytes(1), struct.pack("<II", 77, 1)), "unknown type 77"),
        (file_bytes(rows=tensor_row("a", (4, HUGE), 0, 0)), "the file has"),
        (file_bytes(rows=tensor_row("a", (4, 4), 0, HUGE)), "the file has"),
        (file_bytes(rows=tensor_row("a", (4, 4), 0, 32)), "the file has"),
        (file_bytes(rows=tensor_row("a", (2, 4), 0, 8)), "multiple of 32"),
        (file_bytes(rows=tensor_row("a", (4, 0), 0, 0)), "no size may be 0"),
        (file_bytes(rows=tensor_row("a", (1, 1, 1, 1, 16), 0, 0)), "5 dimensions"),
        (file_bytes(rows=tensor_row("a", (1, 48), 2, 0)), "multiple of 32, the block size of Q4_0"),
        (file_bytes(rows=tensor_row("a", (1, 32), 34, 0)), "type number 34"),
        (file_bytes(rows=2 * tensor_row("a", (4, 4), 0, 0), num_tensors=2), "occurs twice"),
        (file_bytes({"general.alignment": 12}), "general.alignment is 12"),
        (file_bytes({"general.alignment": "x"}), "general.alignment is 'x'"),
    ],
)
def test_damaged_files_are_refused_by_name(read: Callable[[bytes], GgufFile], content: bytes, problem: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ModelError, match=problem):
            read(content)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.gguf").touch()
    for name in ("empty.gguf", "missing.gguf"):
        with pytest.raises(ModelError, match=name):
            GgufFile(tmp_path / name)


LLAMA = {
    "general.architecture": "llama",
    "llama.context_length": 512,
    "llama.embedding_length": 64,
    "llama.block_count": 2,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}
SHAPES = {"token_embd.weight": (256, 64), **{f"blk.{number}.attn_q.weight": (64, 64) for number in range(19)}}


def config_of(metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> dict[str, Any]:
    stored = {
        key: struct.unpack("<f", struct.pack("<f", value))[0] if isinstance(value, float) else value
        for key, value in metadata.items()
    }
    return gguf_config(GgufMetadata(Path("m.gguf"), stored), shapes)


def test_configuration_has_the_values_of_the_file() -> None:
    config = config_of(LLAMA | {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0})
    assert config["rms_norm_eps"] == 1e-5
    assert (config["num_key_value_heads"], config["head_dim"], config["vocab_size"]) == (4, 16, 256)
    assert config["rope_parameters"] == {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}
    assert config["tie_word_embeddings"]
    assert not config_of(LLAMA, SHAPES | {"output.weight": (256, 64)})["tie_word_embeddings"]
    assert config_of(LLAMA | {"llama.attention.head_count_kv": [2, 2]})["num_key_value_heads"] == 2
    biases = {f"blk.0.{name}.bias": (64,) for name in ("attn_q", "ffn_up")}
    for shapes, expected in ((SHAPES, False), (SHAPES | biases, True)):
        assert (config_of(LLAMA, shapes)["attention_bias"], config_of(LLAMA, shapes)["mlp_bias"]) == (expected,) * 2
    assert config_of(LLAMA | {"llama.rope.dimension_count": 8})["rope_parameters"]["partial_rotary_factor"] == 0.5


def test_mistral_small_3_has_no_window() -> None:
    """transformers' Mistral has one of 4096 by default; a file of Mistral Small 3 names none."""
    metadata = {key.replace("llama.", "mistral3."): value for key, value in LLAMA.items()}
    config = config_of(metadata | {"general.architecture": "mistral3"})
    assert (config["model_type"], config["sliding_window"]) == ("mistral", None)


def test_granite_without_a_rotary_embedding_is_refused() -> None:
    metadata = {key.replace("llama.", "granite."): value for key, value in LLAMA.items()}
    metadata |= {"general.architecture": "granite", "granite.attention.scale": 0.5}
    assert config_of(metadata)["attention_multiplier"] == 0.5
    with pytest.raises(ModelError, match="without a rotary embedding"):
        config_of(metadata | {"granite.rope.scaling.finetuned": False})


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"general.architecture": "mamba"}, "architecture 'mamba'; must be one of gemma3, gpt-oss, granite"),
        ({"general.architecture": None}, "general.architecture is None"),
        ({"llama.block_count": None}, r"llama\.block_count is None"),
        ({"llama.block_count": "two"}, "an integer"),
        ({"llama.attention.head_count": 0}, "at least 1"),
        ({"llama.block_count": 1 << 30}, r"llama\.block_count is 1073741824; must be at most 20"),
        ({"llama.embedding_length": 65}, r"llama\.embedding_length is 65; must be at most 64"),
        ({"llama.attention.key_length": 1 << 30}, "must be at most 16384"),
        ({"llama.attention.head_count_kv": [1, 2]}, "the same for all layers"),
        ({"llama.rope.scaling.type": "longrope"}, "longrope"),
        ({"llama.expert_count": 8}, r"llama\.expert_used_count is None"),
        ({"llama.attention.layer_norm_rms_epsilon": "x"}, "a number"),
    ],
)
def test_unusable_metadata_is_refused_by_name(changes: dict[str, Any], problem: str) -> None:
    metadata = {key: value for key, value in (LLAMA | changes).items() if value is not None}
    with pytest.raises(ModelError, match=problem):
        config_of(metadata)


def test_unusable_tensors_are_refused_by_name() -> None:
    with pytest.raises(ModelError, match=r"token_embd\.weight"):
        config_of(LLAMA, {})
    metadata = GgufMetadata(Path("m.gguf"), LLAMA)
    for divisors in ({"rope_factors_long.weight": [1.0] * 8}, dict.fromkeys(LONGROPE_TENSORS.values(), [1.0] * 7)):
        with pytest.raises(ModelError, match=r"longrope, and . values in rope_factors_short.weight; must be 8"):
            gguf_config(metadata, SHAPES, divisors)
