"""Tests that fingerprints cover every byte of the weights, and that kept digests are those of the files."""

import json
import os
import time
from pathlib import Path

import pytest
from xxhash import xxh3_128

from baton.core.errors import ModelError
from baton.model.loading import weight_digests as module
from baton.model.loading.model_fingerprint import model_fingerprint
from baton.model.loading.weight_digests import WAITING, weight_digests
from baton.runtime.child.verdict_cache import MAX_VERDICTS, VerdictCache

SIZE = 300_000
"""More than one buffer of the reader."""


def later() -> float:
    """Return a time at which files that were just written are old enough for their digests to be kept."""
    return time.time() + 60


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(os.urandom(SIZE))
    return path


@pytest.fixture
def cache(tmp_path: Path) -> VerdictCache:
    return VerdictCache(tmp_path / "cache")


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return the files that are read, as a list that grows."""
    found: list[Path] = []
    digest = module._digest

    def noted(path: Path) -> str:
        found.append(path)
        return digest(path)

    monkeypatch.setattr(module, "_digest", noted)
    return found


def kept_file(tmp_path: Path) -> Path:
    (path,) = (tmp_path / "cache").glob("*.json")
    return path


def right(*paths: Path) -> list[str]:
    return [xxh3_128(path.read_bytes()).hexdigest() for path in paths]


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def test_one_byte_anywhere_changes_the_fingerprint(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(file.parent))
    found = {model_fingerprint(file.parent, {"a": 1}, "float32")}
    for offset in (0, 7, 8, 70_001, SIZE // 2, 262_143, 262_144, SIZE - 1):
        flip(file, offset)
        found.add(model_fingerprint(file.parent, {"a": 1}, "float32"))
    assert len(found) == 9


def test_fingerprint_covers_every_file_that_the_index_names(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(file.parent))
    file.rename(file.with_name("a.safetensors"))
    second = file.with_name("b.safetensors")
    second.write_bytes(bytes(SIZE))
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (file.parent / "model.safetensors.index.json").write_text(json.dumps(index))
    before = model_fingerprint(file.parent, {}, "float32")
    flip(second, SIZE - 1)
    assert model_fingerprint(file.parent, {}, "float32") != before


def test_digests_are_those_of_the_files_and_read_once(
    file: Path, tmp_path: Path, cache: VerdictCache, reads: list[Path]
) -> None:
    """The second file is a link, as in the cache of a hub."""
    blob = tmp_path / "blob"
    blob.write_bytes(b"")
    link = tmp_path / "link.safetensors"
    link.symlink_to(blob)
    for _ in range(2):
        assert weight_digests([file, link], cache=cache, clock=later) == right(file, blob)
    assert weight_digests([file, blob], cache=cache, clock=later) == right(file, blob)
    assert len(reads) == 2


def test_a_replaced_file_of_the_same_size_and_time_is_read_again(
    file: Path, tmp_path: Path, cache: VerdictCache, reads: list[Path]
) -> None:
    weight_digests([file], cache=cache, clock=later)
    facts = file.stat()
    flip(file, 100)  # in place: only the time of the inode says so
    os.utime(file, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert weight_digests([file], cache=cache, clock=later) == right(file)
    other = tmp_path / "other"
    other.write_bytes(os.urandom(SIZE))
    os.utime(other, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    other.rename(file)
    assert file.stat().st_mtime_ns == facts.st_mtime_ns
    assert weight_digests([file], cache=cache, clock=later) == right(file)
    assert len(reads) == 3


def test_the_digest_of_a_file_that_was_just_written_is_not_kept(
    file: Path, cache: VerdictCache, reads: list[Path]
) -> None:
    """It could be written again within the same tick of the file system's clock."""
    for _ in range(2):
        weight_digests([file], cache=cache, clock=lambda: file.stat().st_ctime + 1)
    assert len(reads) == 2


def test_the_digest_of_a_file_that_changed_while_it_was_read_is_not_kept(
    file: Path, tmp_path: Path, cache: VerdictCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def digest(path: Path) -> str:
        flip(path, 0)
        os.utime(path, (1, 1))
        return "0" * 32

    monkeypatch.setattr(module, "_digest", digest)
    weight_digests([file], cache=cache, clock=later)
    assert not list((tmp_path / "cache").glob("*.json"))


@pytest.mark.parametrize("digest", [None, [], ["a"], 1, {"a": 1}])
def test_a_damaged_entry_is_ignored(digest: object, file: Path, tmp_path: Path, cache: VerdictCache) -> None:
    weight_digests([file], cache=cache, clock=later)
    path = kept_file(tmp_path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"verdict": {"digest": digest}}))
    assert weight_digests([file], cache=cache, clock=later) == right(file)


def test_an_entry_that_others_may_write_is_ignored(file: Path, tmp_path: Path, cache: VerdictCache) -> None:
    weight_digests([file], cache=cache, clock=later)
    path = kept_file(tmp_path)
    path.write_text(path.read_text().replace(right(file)[0], "0" * 32))
    assert weight_digests([file], cache=cache, clock=later) == ["0" * 32]
    path.chmod(0o666)
    assert weight_digests([file], cache=cache, clock=later) == right(file)


def test_without_a_cache_directory_files_are_hashed_each_time(file: Path, tmp_path: Path, reads: list[Path]) -> None:
    (tmp_path / "cache").touch()
    for _ in range(2):
        assert weight_digests([file], cache=VerdictCache(tmp_path / "cache" / "below"), clock=later) == right(file)
    assert len(reads) == 2


def test_reading_many_bytes_is_said(file: Path, cache: VerdictCache, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    weight_digests([file], cache=VerdictCache(cache.path({}).parent / "other"), clock=later, say=said.append)
    assert not said
    monkeypatch.setattr(module, "NOTABLE_BYTES", SIZE)
    for _ in range(2):
        weight_digests([file], cache=cache, clock=later, say=said.append)
    (text,) = said
    assert "hashes the weights (0.0 GB)" in text


def test_processes_that_start_together_hash_once(
    file: Path, cache: VerdictCache, reads: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While this process waits for the lock, the one that has it keeps its digests."""
    held = cache.locked(module._lock_name(cache, [file]), 1.0)
    held.__enter__()
    said: list[str] = []

    def other_is_done(text: str) -> None:
        said.append(text)
        cache.keep(module._facts(file), {"digest": right(file)[0]})
        held.__exit__(None, None, None)

    assert weight_digests([file], cache=cache, clock=later, say=other_is_done) == right(file)
    assert said == [WAITING]
    assert not reads


def test_a_process_that_was_killed_while_it_hashed_goes_on(
    file: Path, tmp_path: Path, cache: VerdictCache, reads: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digest of each file is kept as soon as it is known. The last file ends the process."""
    files = [file, tmp_path / "second", tmp_path / "third"]
    for path in files[1:]:
        path.write_bytes(path.name.encode())
    digest = module._digest

    def killed(path: Path) -> str:
        if path == files[-1]:
            raise KeyboardInterrupt
        return digest(path)

    with monkeypatch.context() as patch:
        patch.setattr(module, "_digest", killed)
        with pytest.raises(KeyboardInterrupt):
            weight_digests(files, cache=cache, clock=later)
    reads.clear()
    assert weight_digests(files, cache=cache, clock=later) == right(*files)
    assert reads == files[-1:]


def test_digests_of_several_large_checkpoints_are_kept(
    tmp_path: Path, reads: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the user's cache, with more files than other caches have entries."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    files = [tmp_path / f"{number}.safetensors" for number in range(2 * MAX_VERDICTS)]
    for path in files:
        path.write_bytes(path.name.encode())
    for _ in range(2):
        assert weight_digests(files, clock=later) == right(*files)
    assert len(reads) == len(files)


def test_another_model_that_is_hashed_is_not_waited_for(tmp_path: Path, cache: VerdictCache) -> None:
    files = [tmp_path / f"{number}.safetensors" for number in range(32)]
    for path in files:
        path.write_bytes(path.name.encode())
    said: list[str] = []
    with cache.locked(module._lock_name(cache, files[:1]), 1.0):
        for path in files[1:]:
            weight_digests([path], cache=cache, clock=later, say=said.append)
    assert not said


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, cache: VerdictCache) -> None:
    with pytest.raises(ModelError, match=r"gone\.safetensors cannot be read .* download or copy it again"):
        weight_digests([tmp_path / "gone.safetensors"], cache=cache)
