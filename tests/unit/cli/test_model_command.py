import ast
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

import baton.model
from baton.cli import model_command
from baton.cli.main import cli
from baton.core.errors import BatonError

WRITER = "baton.model.loading.random_init"


def run(*args: str) -> Result:
    return CliRunner().invoke(cli, ["model", "init", *args])


def test_fetch_of_a_directory_prints_its_path_or_that_it_is_missing(tmp_path: Path) -> None:
    fetched = CliRunner().invoke(cli, ["model", "fetch", str(tmp_path)])
    assert (fetched.exit_code, fetched.stdout) == (0, f"{tmp_path.resolve()}\n")
    missing = CliRunner().invoke(cli, ["model", "fetch", str(tmp_path / "missing")])
    assert isinstance(missing.exception, BatonError)
    assert "there is no such directory" in str(missing.exception)


def test_offered_shapes_equal_the_shapes_of_the_loader() -> None:
    """The table is parsed instead of imported, because the import would load transformers."""
    tree = ast.parse((Path(baton.model.__file__).parent / "loading" / "model_shapes.py").read_text())
    (table,) = [
        node.value
        for node in tree.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == "SHAPES"
    ]
    assert isinstance(table, ast.Dict)
    assert tuple(key.value for key in table.keys if isinstance(key, ast.Constant)) == model_command.SHAPES


def test_init_writes_the_model_and_prints_how_to_serve_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[tuple[str, Path]] = []

    def init_like(shape: str, out: Path, *, progress: Any) -> None:
        calls.append((shape, out))
        progress(1, 2)
        progress(2, 2)

    monkeypatch.setitem(sys.modules, WRITER, SimpleNamespace(init_like=init_like))  # type: ignore[arg-type]
    done = run("--like", "tiny-moe", "--out", str(tmp_path / "m"))
    assert done.exit_code == 0
    assert calls == [("tiny-moe", tmp_path / "m")]
    assert done.stdout == f"wrote {tmp_path / 'm'}; serve it with: baton up --model {tmp_path / 'm'}\n"


@pytest.mark.parametrize("args", [[], ["--like", "tiny-moe"], ["--like", "tiny", "--out", "x"]])
def test_missing_or_unknown_arguments_are_a_usage_error(args: list[str]) -> None:
    assert run(*args).exit_code == 2


def test_full_disk_raises_a_baton_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setitem(sys.modules, WRITER, SimpleNamespace(init_like=full))  # type: ignore[arg-type]
    done = run("--like", "tiny-moe", "--out", str(tmp_path / "m"))
    assert isinstance(done.exception, BatonError)
    assert "No space left on device" in str(done.exception)
