"""Tests of reading end tokens from a model directory."""

import json
from pathlib import Path

import pytest

from baton.core.eos_token_ids import eos_token_ids
from baton.core.errors import ModelError


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [([5, 6], 7, (5, 6)), (5, 7, (5,)), (None, [7, 8], (7, 8)), (None, None, ()), (0, 7, (0,))],
)
def test_eos_token_ids_come_from_generation_config_then_config(
    tmp_path: Path, generation: object, config: object, expected: tuple[int, ...]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": config}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    assert eos_token_ids(tmp_path) == expected
    (tmp_path / "generation_config.json").unlink()
    assert eos_token_ids(tmp_path) == (
        tuple(config) if isinstance(config, list) else () if config is None else (config,)
    )


@pytest.mark.parametrize("content", ["[1]", "{", "[" * 100_000, '{"text_config": [1]}'])
def test_unreadable_files_are_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=r"config\.json cannot be read"):
        eos_token_ids(tmp_path)


@pytest.mark.parametrize("value", ["</s>", [1, None], True, {"id": 1}, 1.0])
def test_other_values_than_token_ids_are_refused(tmp_path: Path, value: object) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(ModelError, match="must be a token id or a list of them"):
        eos_token_ids(tmp_path)
