"""Tests how products are compared, with a clock of the test's own, and that the verdict is kept."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from baton.model.kernels.cpu.kernel_library import Kernels
from baton.model.linear import product_speed
from baton.model.linear.product_speed import is_faster, measure_ratios, native_is_faster_here
from tests.unit.model.linear.test_packed_linear import kernels_of
from tests.unit.model.native_libraries import library_for, processors


def kernels() -> Kernels:
    return kernels_of(library_for(processors()[0]))


class Clock:
    """A clock that products advance."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def taking(self, durations_s: Iterator[float]) -> Callable[[torch.Tensor, int], None]:
        def product(_x: torch.Tensor, _number: int) -> None:
            self.now_s += next(durations_s)

        return product


def test_the_shortest_times_count_and_the_first_does_not() -> None:
    clock = Clock()
    native = clock.taking(iter([0.1, 8.0, 4.0, 5.0, 9.0, 6.0]))
    own = clock.taking(iter([0.1, 3.0, 2.0, 7.0, 6.0, 5.0]))
    assert measure_ratios(native, own, [torch.zeros(8, 1)], clock) == {"8": pytest.approx(0.5)}


@pytest.mark.parametrize(
    ("ratios", "expected"), [((1.5, 0.8), True), ((1.2, 0.8), False), ((1.0, 1.0), False), ((0.5, 2.1), True)]
)
def test_the_faster_product_on_average_is_chosen(ratios: tuple[float, float], expected: bool) -> None:
    assert is_faster(dict(zip("ab", ratios, strict=True))) is expected


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """Count measurements; the native product is twice as fast in float32 only."""
    calls: list[torch.dtype] = []

    def measure(_kernels: object, dtype: torch.dtype, _clock: object) -> dict[str, float]:
        calls.append(dtype)
        return {"1": 2.0 if dtype == torch.float32 else 0.5}

    monkeypatch.setattr(product_speed, "_measured", measure)
    return calls


def test_a_verdict_is_measured_once(measured: list[torch.dtype], tmp_path: Path) -> None:
    for _ in range(2):
        assert native_is_faster_here(kernels(), torch.float32, directory=tmp_path)
        assert not native_is_faster_here(kernels(), torch.float16, directory=tmp_path)
    assert measured == [torch.float32, torch.float16]


def test_workers_with_other_numbers_of_threads_get_the_same_verdict(
    measured: list[torch.dtype], tmp_path: Path
) -> None:
    library = library_for(processors()[0])
    for num_threads in (1, 2):
        native_is_faster_here(Kernels(library, num_threads), torch.float32, directory=tmp_path)
    assert measured == [torch.float32]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"1": 0}', '{"1": "fast"}', '{"1": NaN}'])
def test_a_damaged_verdict_is_measured_again(text: str, measured: list[torch.dtype], tmp_path: Path) -> None:
    native_is_faster_here(kernels(), torch.float32, directory=tmp_path)
    (path,) = tmp_path.glob("*.json")
    path.write_text(text)
    assert native_is_faster_here(kernels(), torch.float32, directory=tmp_path)
    assert len(measured) == 2


def test_without_a_directory_it_is_measured_at_each_start(measured: list[torch.dtype], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert native_is_faster_here(kernels(), torch.float32, directory=tmp_path / "file")
    assert len(measured) == 1


def test_real_products_are_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(product_speed, "SHAPE", (64, 32))
    ticks = iter(range(10**6))
    assert not native_is_faster_here(kernels(), torch.float32, directory=tmp_path, clock=lambda: float(next(ticks)))
