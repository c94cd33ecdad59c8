"""Tests files of packed models: what is mapped equals what was packed, and no damaged file is used."""

import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from baton.core.errors import ModelError
from baton.model.backends.backend_selection import choose_backend
from baton.model.kernels.cpu.kernel_library import load_kernels
from baton.model.linear.linear import Linear
from baton.model.linear.packer import WeightPacker
from baton.model.loading import model_loader
from baton.model.loading.image import image_cache, image_model
from baton.model.loading.image.image_cache import PackedModelCache, image_key
from baton.model.loading.image.image_file import ImageFile, ImageUnusable, ImageWriter, checksum
from baton.model.loading.image.image_model import probe_logits
from baton.model.loading.model_loader import LoadedModel, load_model
from baton.runtime import user_cache
from tests.model_families import OTHER_FORMS, TINY
from tests.unit.model.loading.quantised_models import QWEN3, write_checkpoint
from tests.unit.model.loading.test_published_layouts import CONFIGS

MIB = 1 << 20


def packer(dtype: torch.dtype) -> WeightPacker:
    """Return a packer that packs plain weights, too, whatever this processor has."""
    return WeightPacker(load_kernels(1), dtype=dtype, native_is_faster=True)


def load(path: Path, cache: Path, *, max_bytes: int = 64 * MIB, **options: Any) -> LoadedModel:
    return load_model(
        path,
        device="cpu",
        packer_for=packer,
        cache=PackedModelCache(max_bytes, cache),
        **{"dtype": "bfloat16"} | options,
    )


def logits_of(loaded: LoadedModel) -> torch.Tensor:
    return probe_logits(loaded.model)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(image_cache, "RESERVED_BYTES", 0)
    return tmp_path / "cache"


@pytest.fixture
def tiny(save: Callable[[PreTrainedConfig], Path]) -> Path:
    return save(LlamaConfig(**TINY, attention_bias=True))


@pytest.fixture
def unreadable(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Let checkpoints be unreadable from now on."""

    def fail(*_: object, **_others: object) -> None:
        raise AssertionError("the checkpoint was read")

    def apply() -> None:
        monkeypatch.setattr("baton.model.loading.model_loader._load_plain", fail)
        monkeypatch.setattr("baton.model.loading.model_loader.open_by_module", fail)

    return apply


CASES = {
    "biases": (lambda: LlamaConfig(**TINY, attention_bias=True), {}),
    "tied": (lambda: Gemma3TextConfig(**TINY, head_dim=32), {}),
    "int4": (lambda: Gemma3TextConfig(**TINY, head_dim=32), {"weights": "int4"}),
    "float32": (lambda: LlamaConfig(**TINY), {"dtype": "float32"}),
    "plain experts": (lambda: Qwen3MoeConfig(**TINY, **EXPERTS), {}),
    "int8 experts": (lambda: Qwen3MoeConfig(**TINY, **EXPERTS), {"weights": "int8"}),
    "experts with biases": (
        lambda: GptOssConfig(**TINY, head_dim=16, num_local_experts=4, num_experts_per_tok=2),
        {"weights": "int8"},
    ),
    **{f"{name}, {each}": (OTHER_FORMS[name], {"weights": each}) for name in OTHER_FORMS for each in ("auto", "int8")},
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}


@pytest.mark.parametrize("name", list(CASES))
def test_the_second_start_reads_no_checkpoint_and_gives_the_same_logits(
    name: str, save: Callable[[PreTrainedConfig], Path], cache: Path, unreadable: Callable[[], None]
) -> None:
    config, options = CASES[name]
    path = save(config())
    first = load(path, cache, **options)
    assert first.mapped_bytes > 0
    unreadable()
    second = load(path, cache, **options)
    assert torch.equal(logits_of(second), logits_of(first))
    assert (second.weight_format, second.model_fingerprint) == (first.weight_format, first.model_fingerprint)
    assert second.dtype == first.dtype
    assert {name for name, _ in second.model.named_parameters()} == {name for name, _ in first.model.named_parameters()}
    assert second.mapped_bytes == first.mapped_bytes


def test_the_orders_of_inputs_are_in_the_file(tmp_path: Path, cache: Path, unreadable: Callable[[], None]) -> None:
    quantization, pack = CONFIGS["gptq desc_act"]
    write_checkpoint(tmp_path / "m", Qwen3Config(**QWEN3), quantization, lambda module, value: pack(value))
    first = load(tmp_path / "m", cache)
    unreadable()
    second = load(tmp_path / "m", cache)
    assert second.mapped_bytes == first.mapped_bytes > 0
    assert torch.equal(logits_of(second), logits_of(first))
    projection = second.model.base_model.layers[0].mlp.down_proj
    assert projection.weight.input_order is not None


def test_a_mapped_model_runs_on_the_native_decoder(tiny: Path, cache: Path) -> None:
    load(tiny, cache)
    backend = choose_backend(load(tiny, cache), kernels="auto", num_threads=1, block_size_tokens=16)
    assert backend.name == "native decoder"
    backend.forward.close()


@pytest.mark.parametrize("name", ["biases", "plain experts", "int8 experts"])
def test_packed_weights_lie_in_the_file(name: str, save: Callable[[PreTrainedConfig], Path], cache: Path) -> None:
    """Those of the first start, too. So a worker that starts later shares memory with it."""
    config, options = CASES[name]
    path = save(config())
    for loaded in (load(path, cache, **options), load(path, cache, **options)):
        large = [name for name, each in loaded.model.named_parameters() if "proj" in name and each.dim() > 1]
        assert not large, "everything that backends pack is packed"
        mapped = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if ".weights" in line]
        ranges = [tuple(int(end, 16) for end in fields[0].split("-")) for fields in mapped]
        assert {fields[1] for fields in mapped} == {"r--s"}
        for module in loaded.model.modules():
            if isinstance(module, Linear):
                address = module.weight.memory.address  # type: ignore[union-attr]
                assert any(begin <= address < end for begin, end in ranges)


def the_file(cache: Path) -> Path:
    (path,) = cache.glob("*.weights")
    return path


def damage_weight(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[100] ^= 4
    path.write_bytes(data)


def damage_index(path: Path) -> None:
    data = path.read_bytes()
    begin = data.rindex(b'"weights"')
    path.write_bytes(data[:begin] + b'"veights"' + data[begin + 9 :])


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def open_to_others(path: Path) -> None:
    path.chmod(0o666)


@pytest.mark.parametrize("change", [damage_weight, damage_index, cut, empty, open_to_others])
def test_a_file_that_cannot_be_trusted_is_replaced(
    change: Callable[[Path], None], tiny: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = logits_of(load(tiny, cache))
    change(the_file(cache))
    assert torch.equal(logits_of(load(tiny, cache)), expected)
    assert "packed_model_not_used" in caplog.text
    caplog.clear()
    load(tiny, cache)
    assert "packed_model_not_used" not in caplog.text
    ImageFile(the_file(cache))


def test_a_model_that_gives_other_logits_is_not_used(
    tiny: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as after a change of the model's own code."""
    load(tiny, cache)
    own = image_model._read

    def with_other_norms(model: Any, *others: Any) -> Any:
        model.model.norm.register_forward_hook(lambda _module, _inputs, out: out.roll(1, -1))
        return own(model, *others)

    monkeypatch.setattr(image_model, "_read", with_other_norms)
    loaded = load(tiny, cache)
    assert "gives other logits" in caplog.text
    assert not loaded.model.model.norm._forward_hooks


@pytest.mark.parametrize("max_bytes", [0, 20_000])
def test_without_space_weights_stay_in_memory(
    max_bytes: int, tiny: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = logits_of(load(tiny, cache))
    the_file(cache).unlink()
    assert torch.equal(logits_of(load(tiny, cache, max_bytes=max_bytes)), expected)
    assert not list(cache.iterdir())
    assert ("set --weight-cache to more" in caplog.text) == bool(max_bytes)


def test_a_full_disk_is_no_error(tiny: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_cache, "RESERVED_BYTES", 1 << 60)
    assert load(tiny, cache).mapped_bytes == 0
    (cache / "file").write_text("no directory")
    assert load(tiny, cache / "file").mapped_bytes == 0


def test_the_files_used_last_are_kept(tiny: Path, cache: Path) -> None:
    load(tiny, cache, dtype="float32")
    oldest = the_file(cache)
    os.utime(oldest, (1, 1))
    size = oldest.stat().st_size
    load(tiny, cache, max_bytes=size + 1)
    assert the_file(cache) != oldest


def test_what_a_killed_worker_left_is_removed(tiny: Path, cache: Path) -> None:
    load(tiny, cache)
    left = [cache / f"new-{key}-1" for key in (the_file(cache).stem, "of_an_older_version", "of_another_model")]
    the_file(cache).unlink()
    for path in left:
        path.write_bytes(b"half")
    os.utime(left[1], (1, 1))
    load(tiny, cache)
    assert [path.exists() for path in left] == [False, False, True], "the last one may be written right now"


def test_locks_of_killed_workers_are_removed(tiny: Path, cache: Path) -> None:
    cache.mkdir()
    left, held = cache / "lock-left", cache / "lock-held"
    left.touch()
    with user_cache.locked(held):
        load(tiny, cache)
        assert [path.name for path in cache.glob("lock-*")] == [held.name]


def test_models_are_packed_at_the_same_time(
    tiny: Path, save: Callable[[PreTrainedConfig], Path], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is packed in the middle of the other, whose lock it does not need. Their keys begin alike."""
    other, loaded = save(LlamaConfig(**TINY)), list[LoadedModel]()
    lock, key, load_plain = fcntl.flock, image_cache.image_key, model_loader._load_plain

    def after_the_other(*arguments: Any) -> Any:
        monkeypatch.setattr(model_loader, "_load_plain", load_plain)
        loaded.append(load(other, cache))
        return load_plain(*arguments)

    monkeypatch.setattr(fcntl, "flock", lambda file, operation: lock(file, operation | fcntl.LOCK_NB))
    monkeypatch.setattr(image_cache, "image_key", lambda *facts: "0" + key(*facts))
    monkeypatch.setattr(model_loader, "_load_plain", after_the_other)
    loaded.append(load(tiny, cache))
    assert all(each.mapped_bytes for each in loaded)
    assert len(list(cache.iterdir())) == 2


def test_memory_for_a_file_is_required(tiny: Path, cache: Path) -> None:
    load(tiny, cache)
    with pytest.raises(ModelError, match="take 0 MiB"):
        load(tiny, cache, free_bytes=lambda _device: 1000)


def test_keys_differ_with_everything_that_decides_the_bytes() -> None:
    keys = {image_key(each, packer(torch.float32)) for each in "ab"}
    keys.add(image_key("a", packer(torch.bfloat16)))
    keys.add(image_key("a", WeightPacker(load_kernels(1), dtype=torch.float32, native_is_faster=False)))
    assert len(keys) == 4
    assert image_key("a", packer(torch.float32)) in keys


def test_a_repaired_checkpoint_is_packed_again(save: Callable[[PreTrainedConfig], Path], cache: Path) -> None:
    """A few rows of a large tensor were zero, as after an interrupted copy."""
    path = save(LlamaConfig(**TINY | {"vocab_size": 2048}))
    file = path / "model.safetensors"
    right, expected = file.read_bytes(), logits_of(load(path, cache, dtype="float32"))
    tensors = load_file(file)
    tensors["lm_head.weight"].view(-1)[116_000:121_000] = 0
    save_file(tensors, file)
    damaged = load(path, cache, dtype="float32")
    assert not torch.equal(logits_of(damaged), expected)
    file.write_bytes(right)
    repaired = load(path, cache, dtype="float32")
    assert repaired.model_fingerprint != damaged.model_fingerprint
    assert torch.equal(logits_of(repaired), expected)


def test_a_model_that_cannot_be_built_without_weights_is_loaded_again(
    tiny: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = logits_of(load(tiny, cache))

    def fail(*_: object) -> None:
        raise RuntimeError("Tensor.item() cannot be called on meta tensors")

    monkeypatch.setattr("baton.model.loading.model_loader.build_skeleton", fail)
    assert torch.equal(logits_of(load(tiny, cache)), expected)
    assert "cannot be built without its weights: RuntimeError" in caplog.text


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[ImageWriter]:
    writer = ImageWriter(tmp_path / "file", max_bytes=MIB)
    yield writer
    writer.close()


def test_sections_are_read_as_they_were_written(writer: ImageWriter, tmp_path: Path) -> None:
    parts = [np.random.default_rng(size).integers(0, 256, size, np.uint8) for size in (1, 70_000, 0, 4096, 65_536)]
    sections = [writer.append(part) for part in parts]
    assert all(np.array_equal(writer.mapped(section), part) for section, part in zip(sections, parts, strict=True))
    writer.finish({"own": [1]})
    file = ImageFile(tmp_path / "file")
    assert file.index == {"own": [1]}
    assert file.num_bytes == writer.num_bytes == (tmp_path / "file").stat().st_size
    assert all(np.array_equal(file.section(section), part) for section, part in zip(sections, parts, strict=True))
    assert not file.section(sections[1]).flags.writeable
    with pytest.raises(ImageUnusable, match="is not within"):
        file.section(type(sections[0])(1 << 40, 5, ""))


def test_a_section_larger_than_a_window_is_mapped(
    writer: ImageWriter, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("baton.model.loading.image.image_file._WINDOW_BYTES", 8192)
    parts = [np.full(size, 7 + size % 5, np.uint8) for size in (5000, 5000, 20_000, 100)]
    mapped = [writer.mapped(writer.append(part)) for part in parts]
    writer.finish({})
    assert all(np.array_equal(found, part) for found, part in zip(mapped, parts, strict=True))


@pytest.mark.parametrize("size", [10, 65_536, 200_001])
def test_checksums_find_zeros_and_bytes_from_elsewhere(size: int) -> None:
    data = np.random.default_rng(0).integers(1, 256, size, np.uint8)
    right = checksum(data)
    for begin, end in ((0, 1), (size - 1, size), (size // 2, size // 2 + 8)):
        damaged = data.copy()
        damaged[begin:end] = 0
        assert checksum(damaged) != right
    assert checksum(data[:-1]) != right
    if size > 131_072:
        assert checksum(np.concatenate([data[65_536:131_072], data[:65_536], data[131_072:]])) != right
