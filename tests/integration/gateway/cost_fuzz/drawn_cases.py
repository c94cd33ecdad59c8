"""Draws the cases of a batch from its seed, in a process of its own while another batch is measured."""

from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from types import TracebackType
from typing import Self

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.integration.gateway.cost_fuzz.cost_case import CostCase
from tests.integration.gateway.cost_fuzz.legal_requests import legal_cases
from tests.integration.gateway.cost_fuzz.malformed_requests import malformed_cases


def drawn_cases(batch: int, size: int) -> list[CostCase]:
    """Return the cases of a batch. Its number is the seed, so that they are the same in each run."""
    drawn: list[CostCase] = []

    @seed(batch)
    @settings(
        max_examples=size,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.one_of(legal_cases(), malformed_cases()))
    def draw(case: CostCase) -> None:
        drawn.append(case)

    draw()
    return drawn[:size]


class CaseDrawer:
    """Draws batches of `size` cases, each while its predecessor is measured. Use as a context manager."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
        self._drawn: dict[int, Future[list[CostCase]]] = {}

    def cases(self, batch: int) -> list[CostCase]:
        """Return the cases of a batch, and begin to draw the next one."""
        drawn = self._drawn.pop(batch, None) or self._pool.submit(drawn_cases, batch, self._size)
        self._drawn = {batch + 1: self._pool.submit(drawn_cases, batch + 1, self._size)}
        return drawn.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)
