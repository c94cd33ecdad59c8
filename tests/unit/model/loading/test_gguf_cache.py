"""Tests that directories made from GGUF files are kept, found again, and removed."""

import os
from pathlib import Path

import pytest

from baton.core.errors import ModelError
from baton.model.loading.gguf import gguf_cache
from baton.model.loading.gguf.gguf_cache import MAX_DIRECTORIES, _key, gguf_directory


def test_directory_is_made_once_and_found_again(tmp_path: Path) -> None:
    made = []

    def write(path: Path, directory: Path) -> None:
        made.append(path)
        (directory / "config.json").write_text("{}")

    model, cache = tmp_path / "m.gguf", tmp_path / "cache"
    model.write_bytes(b"1")
    first = gguf_directory(model, cache=cache, convert=write)
    assert gguf_directory(model, cache=cache, convert=write) == first
    assert len(made) == 1
    model.write_bytes(b"22")
    assert gguf_directory(model, cache=cache, convert=write) != first
    for number in range(MAX_DIRECTORIES + 3):
        model.write_bytes(bytes(number + 3))
        last = gguf_directory(model, cache=cache, convert=write)
    assert len(list(cache.iterdir())) == MAX_DIRECTORIES
    assert last.is_dir()


def test_what_a_killed_conversion_left_is_removed(tmp_path: Path) -> None:
    model, cache = tmp_path / "m.gguf", tmp_path / "cache"
    model.touch()
    for name in ("new-old", "new-running"):
        (cache / name / "model").mkdir(parents=True)
    os.utime(cache / "new-old", (1, 1))
    directory = gguf_directory(model, cache=cache, convert=lambda _path, made: (made / "config.json").touch())
    assert {each.name for each in cache.iterdir()} == {directory.name, "new-running"}


def test_a_directory_that_cannot_get_its_name_is_an_error(tmp_path: Path) -> None:
    model, cache = tmp_path / "m.gguf", tmp_path / "cache"
    model.touch()

    def put_a_file_in_its_place(_path: Path, made: Path) -> None:
        (cache / _key(model)).touch()

    with pytest.raises(ModelError, match="cannot be written"):
        gguf_directory(model, cache=cache, convert=put_a_file_in_its_place)


def test_failed_conversion_leaves_nothing(tmp_path: Path) -> None:
    def fail(path: Path, directory: Path) -> None:
        raise ModelError(f"{path} is damaged")

    (tmp_path / "m.gguf").touch()
    with pytest.raises(ModelError, match="is damaged"):
        gguf_directory(tmp_path / "m.gguf", cache=tmp_path / "cache", convert=fail)
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize(
    ("program", "problem"),
    [
        ("""print('a warning'); print('{"problem": "m.gguf is damaged"}')""", "^m.gguf is damaged$"),
        ("raise SystemExit('no memory')", "failed with exit code 1: no memory"),
    ],
)
def test_what_the_converting_process_reports_is_raised(
    program: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_cache, "CONVERTER", "converter_of_this_test")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "converter_of_this_test.py").write_text(program)
    (tmp_path / "m.gguf").touch()
    with pytest.raises(ModelError, match=problem):
        gguf_directory(tmp_path / "m.gguf", cache=tmp_path / "cache")


def test_wrong_types_of_tokens_are_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(gguf_cache, "CONVERTER", "converter_of_this_test")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "converter_of_this_test.py").write_text("""print('{"mistyped": ["<end_of_turn>"]}')""")
    (tmp_path / "m.gguf").touch()
    for _ in range(2):
        gguf_directory(tmp_path / "m.gguf", cache=tmp_path / "cache")
    (said,) = (str(record.msg) for record in caplog.records if "gguf_token_types_corrected" in str(record.msg))
    assert "<end_of_turn>" in said


def test_conversion_runs_no_module_of_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file there, which may be another user's, could have the name of a library."""
    monkeypatch.setattr(gguf_cache, "CONVERTER", "found_here")
    (tmp_path / "found_here.py").write_text("print('{}')")
    (tmp_path / "m.gguf").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match="No module named found_here"):
        gguf_directory(tmp_path / "m.gguf", cache=tmp_path / "cache")
