"""The fuzz targets accept their seeds, and find what they are for."""

import importlib
from pathlib import Path

import pytest

from tests.fuzz.run_target import MAX_INPUT_CPU_S, TARGETS, TooExpensive, bounded

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
    cpu_s = 100.0
    monkeypatch.setattr("tests.fuzz.run_target.time.process_time", lambda: cpu_s)

    def take(data: bytes) -> None:
        nonlocal cpu_s
        cpu_s += MAX_INPUT_CPU_S + 0.1 * (len(data) - 2)

    bounded(take)(b"a")
    with pytest.raises(TooExpensive, match=r"3 bytes took 5\.1 s"):
        bounded(take)(b"abc")
