"""Tests of what a kept verdict depends on."""

from pathlib import Path

from baton.model.software_facts import PYTHON, PYTHON_AND_CPP, software_facts, source_hash


def test_the_source_hash_covers_every_file(tmp_path: Path) -> None:
    found = []

    def write(name: str, text: str) -> None:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        found.append(source_hash(tmp_path, PYTHON_AND_CPP))

    write("a.py", "x = 1\n")
    write("b.py", "")
    write("b.py", "y = 1\n")
    write("cpu/c.h", "")
    write("cpu/d.cpp", "")
    (tmp_path / "b.py").rename(tmp_path / "e.py")
    found.append(source_hash(tmp_path, PYTHON_AND_CPP))
    assert len(set(found)) == len(found)
    write("notes.txt", "not a source")
    assert found[-1] == found[-2]
    only_python = source_hash(tmp_path, PYTHON)
    write("cpu/c.h", "int x;")
    assert found[-1] != found[-2]
    assert source_hash(tmp_path, PYTHON) == only_python


def test_facts_name_the_libraries() -> None:
    assert {"baton", "torch", "transformers", "source"} <= set(software_facts())
