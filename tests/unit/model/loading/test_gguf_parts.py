"""Loads split GGUF files, and refuses parts that are missing or do not belong together."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from baton.core.errors import ModelError
from baton.model.loading.gguf.gguf_cache import gguf_directory
from baton.model.loading.gguf.gguf_directory import write_gguf_directory
from baton.model.loading.gguf.gguf_file import GgufFile
from baton.model.loading.gguf.gguf_parts import part_paths
from baton.model.loading.model_fingerprint import model_fingerprint
from baton.model.loading.model_loader import load_model
from tests.unit.model.loading.gguf_models import random_state, write_gguf
from tests.unit.model.loading.quantised_models import distance, logits, reference_logits, tokens
from tests.unit.model.loading.test_gguf_file import file_bytes, tensor_row
from tests.unit.model.loading.test_gguf_models import convert, mixed, sizes

pytest.importorskip("gguf", reason="the gguf library is not installed")


def part_name(number: int, count: int = 3, stem: str = "m") -> str:
    return f"{stem}-{number:05d}-of-{count:05d}.gguf"


@pytest.mark.parametrize(("given", "small_first_shard"), [(1, False), (3, True)])
def test_split_model_has_the_logits_of_all_its_parts(given: int, small_first_shard: bool, tmp_path: Path) -> None:
    """The parts come from llama.cpp's own library. Its small first part has the metadata, and no tensors."""
    config = LlamaConfig(**sizes(), rms_norm_eps=1e-5)
    options = {"split_max_tensors": 10, "small_first_shard": small_first_shard}
    state = random_state(config)
    means = write_gguf(tmp_path / "m.gguf", "llama", config, state, pick=mixed, writer_options=options)
    count = len(list(tmp_path.iterdir()))
    assert count == (4 if small_first_shard else 3)
    loaded = load_model(convert(tmp_path / part_name(given, count)), dtype="float32", device="cpu")
    assert distance(logits(loaded.model, tokens(config)), reference_logits(config, means)) < 1e-5


def write_part(path: Path, number: int, *, first_tensor: str = "a", **changes: Any) -> None:
    """Write part `number` of 3, from 1, with a tensor of its own."""
    metadata = {"split.no": number - 1, "split.count": 3, "split.tensors.count": 3, **changes}
    name = first_tensor if number == 1 else f"t{number}"
    (path / part_name(number)).write_bytes(file_bytes(metadata, tensor_row(name, (4, 4), 0, 0)))


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    for number in (1, 2, 3):
        write_part(tmp_path, number)
    return tmp_path


def test_any_part_leads_to_all(parts: Path) -> None:
    paths = [parts / part_name(number) for number in (1, 2, 3)]
    for given in paths:
        assert part_paths(given) == paths
    assert list(GgufFile(*paths).tensors) == ["a", "t2", "t3"]


@pytest.mark.parametrize("name", ["m.gguf", "m-00004-of-00003.gguf", "m-00000-of-00003.gguf", "m-1-of-3.gguf"])
def test_other_names_are_whole_files(name: str, tmp_path: Path) -> None:
    assert part_paths(tmp_path / name) == [tmp_path / name]


def test_missing_parts_are_named(parts: Path) -> None:
    (parts / part_name(1)).unlink()
    (parts / part_name(3)).unlink()
    with pytest.raises(ModelError, match=r" 2 of them are missing, the first is \S+/m-00001-of-00003\.gguf; download"):
        part_paths(parts / part_name(2))


def swap(parts: Path) -> None:
    write_part(parts, 2, **{"split.no": 2})


def change_count(parts: Path) -> None:
    write_part(parts, 3, **{"split.count": 4})


def change_tensors(parts: Path) -> None:
    write_part(parts, 2, **{"split.tensors.count": 9})


def change_total(parts: Path) -> None:
    for number in (1, 2, 3):
        write_part(parts, number, **{"split.tensors.count": 4})


def repeat_tensor(parts: Path) -> None:
    write_part(parts, 1, first_tensor="t2")


def replace_by_whole_file(parts: Path) -> None:
    (parts / part_name(1)).write_bytes(file_bytes())


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (swap, r"m-00002-of-00003\.gguf is not part 2 of 3 of one model: its split\.no is 2; must be 1\. Download"),
        (change_count, r"m-00003-of-00003\.gguf is not part 3 of 3 .* its split\.count is 4; must be 3\. Download"),
        (change_tensors, r"m-00002-of-00003\.gguf .* its split\.tensors\.count is 9; must be 3\. Download"),
        (change_total, r"m-00001-of-00003\.gguf: its parts have 3 tensors; split\.tensors\.count is 4\. Download"),
        (repeat_tensor, r"m-00002-of-00003\.gguf: the tensor 't2' is in m-00001-of-00003\.gguf, too\. Download"),
        (replace_by_whole_file, r"m-00001-of-00003\.gguf is not part 1 of 3 .* split\.count is 1; must be 3"),
    ],
)
def test_parts_that_do_not_belong_together_are_refused(
    parts: Path, damage: Callable[[Path], None], problem: str
) -> None:
    damage(parts)
    with pytest.raises(ModelError, match=problem):
        GgufFile(*part_paths(parts / part_name(1)))


def test_a_part_under_another_name_is_refused(parts: Path) -> None:
    with pytest.raises(ModelError, match=r"first\.gguf is one of 3 parts, .* such as NAME-00001-of-00003\.gguf"):
        GgufFile(*part_paths((parts / part_name(1)).rename(parts / "first.gguf")))


def test_a_file_that_was_joined_is_whole(tmp_path: Path) -> None:
    """llama.cpp's `gguf-split --merge` leaves the metadata of the first part, with 0 parts."""
    (tmp_path / "m.gguf").write_bytes(file_bytes({"split.no": 0, "split.count": 0, "split.tensors.count": 1}))
    assert list(GgufFile(*part_paths(tmp_path / "m.gguf")).tensors) == ["a.weight"]


def test_directory_is_that_of_all_parts(parts: Path) -> None:
    """Each part gives the same directory, and a change of any part another one."""
    cache = parts / "cache"

    def made(number: int) -> Path:
        return gguf_directory(parts / part_name(number), cache=cache, convert=lambda _path, _directory: None)

    first = made(1)
    assert made(2) == made(3) == first
    os.utime(parts / part_name(3), (1, 1))
    assert made(1) != first


def test_links_count_by_their_own_names(tmp_path: Path) -> None:
    """The hub's cache has links with the names of the parts to files whose names are digests."""
    config = LlamaConfig(**sizes(num_hidden_layers=1))
    options = {"split_max_tensors": 8}
    write_gguf(tmp_path / "m.gguf", "llama", config, random_state(config), writer_options=options)
    (tmp_path / "blobs").mkdir()
    for number in (1, 2):
        part = tmp_path / part_name(number, 2)
        part.symlink_to(part.rename(tmp_path / "blobs" / f"digest{number}"))

    def convert_it(path: Path, directory: Path) -> None:
        write_gguf_directory(path, directory)

    directory = gguf_directory(tmp_path / part_name(2, 2), cache=tmp_path / "cache", convert=convert_it)
    links = sorted(each for each in directory.iterdir() if each.is_symlink())
    assert [link.resolve() for link in links] == [tmp_path / "blobs" / f"digest{number}" for number in (1, 2)]
    load_model(directory, device="cpu")


def test_fingerprint_covers_the_bytes_of_every_part(parts: Path) -> None:
    directory = parts / "model"
    directory.mkdir()
    for number in (1, 2, 3):
        (directory / part_name(number, stem="model")).symlink_to(parts / part_name(number))
    found = {model_fingerprint(directory, {}, "float32")}
    for number in (1, 2, 3):
        part = parts / part_name(number)
        part.write_bytes(part.read_bytes()[:-1] + b"x")
        found.add(model_fingerprint(directory, {}, "float32"))
    assert len(found) == 4
