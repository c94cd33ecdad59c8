"""The fuzz targets accept their seeds, and find what they are for."""

import importlib
from pathlib import Path

import pytest

from tests.fuzz.run_target import TARGETS, TooExpensive, bounded

SEEDS = Path(__file__).parents[1] / "fuzz/corpus"


@pytest.mark.parametrize("name", TARGETS)
def test_target_accepts_its_seeds(name: str) -> None:
    target = importlib.import_module(f"tests.fuzz.{name}")
    seeds = sorted((SEEDS / name).iterdir())
    assert len(seeds) >= 4
    for seed in seeds:
        data = seed.read_bytes()
        for variant in (data, b"", data[:-1], data[:1] + data, data[::-1], data[:1] + b"\0\xff" + data[1:]):
            bounded(target.run_one)(variant)


def test_expensive_input_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.fuzz.run_target.MAX_INPUT_CPU_S", 0.01)
    bounded(lambda data: None)(b"")
    with pytest.raises(TooExpensive, match="3 bytes took"):
        bounded(lambda data: sum(range(2_000_000)))(b"abc")
