"""`python -m bench` finds every benchmark by name."""

import ast

import pytest

from bench.__main__ import main, overview, scenarios


def test_every_scenario_is_listed_and_can_be_run() -> None:
    listed = overview()
    assert len(scenarios()) >= 16
    for name, file in scenarios().items():
        assert f"  {name} " in listed
        assert any(
            isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"
            for node in ast.parse(file.read_text()).body
        )


def test_unknown_name_exits_with_2_and_names_the_benchmarks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["no_such_bench"]) == 2
    assert "scheduler" in capsys.readouterr().err
