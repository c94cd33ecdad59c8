"""One engine in its own process, with any worker settings and with drafts, for `engine_gpu`."""

import multiprocessing
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from bench.systems.bench_worker import worker_config
from bench.systems.engines import InProcess, answer_within

START_S, LAST_S = 300.0, 10.0


class TunedEngine(InProcess):
    """`InProcess` with any worker settings."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._open(worker_config(**settings))

    @property
    def summary(self) -> str:
        """The device summary that a worker prints at start."""
        return self._device.summary

    @property
    def acceptance(self) -> float:
        """Share of drafts that were right, since the start."""
        counters = self._engine.counters
        return counters.accepted_draft_tokens / max(1, counters.draft_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedEngine:
    """An engine in another process, ready to run.

    start_s: from the process's start until then. answer_s: longest wait for an answer.
    """

    summary: str
    start_s: float
    answer_s: float
    _pipe: Connection

    def __call__(self, prompts: Sequence[Sequence[int]], num_outputs: int) -> list[list[float]]:
        """Run all prompts together and return the arrival times of their tokens, in seconds.

        Raises RuntimeError if the engine fails, or does not answer in time. It can then not be used again.
        """
        self._pipe.send((prompts, num_outputs))
        times: list[list[float]] = self._answer()
        return times

    def acceptance(self) -> float:
        """Return the share of drafts that were right."""
        self._pipe.send(None)
        return float(self._answer())

    def _answer(self) -> Any:
        answer = answer_within(self._pipe, self.answer_s)
        if isinstance(answer, Exception):
            raise answer
        return answer


class EngineProcess:
    """Context manager of one `StartedEngine`. The process ends with the block, and its GPU memory is free."""

    def __init__(self, settings: Mapping[str, Any], answer_s: float) -> None:
        self._settings, self._answer_s = dict(settings), answer_s
        context = multiprocessing.get_context("spawn")
        self._own_end, engine_end = context.Pipe()
        self._process = context.Process(target=_run, args=(self._settings, engine_end), daemon=False)
        self._engine_end = engine_end

    def __enter__(self) -> StartedEngine:
        began_s = time.perf_counter()
        self._process.start()
        self._engine_end.close()
        if not self._own_end.poll(START_S):
            self.__exit__()
            raise RuntimeError(f"the engine did not start within {START_S:g} s")
        try:
            summary = self._own_end.recv()
        except EOFError:
            self.__exit__()
            raise RuntimeError("the engine's process ended while it started") from None
        if isinstance(summary, Exception):
            self.__exit__()
            raise summary
        start_s = time.perf_counter() - began_s
        return StartedEngine(summary=summary, start_s=start_s, answer_s=self._answer_s, _pipe=self._own_end)

    def __exit__(self, *_error: object) -> None:
        self._own_end.close()
        self._process.join(LAST_S)
        self._process.kill()
        self._process.join()


def _run(settings: Mapping[str, Any], requests: Connection) -> None:
    try:
        engine = TunedEngine(settings)
    except Exception as error:
        requests.send(RuntimeError(f"{type(error).__name__}: {error}"))
        return
    requests.send(engine.summary)
    try:
        while True:
            asked = requests.recv()
            try:
                requests.send(engine.acceptance if asked is None else engine(*asked))
            except Exception as error:
                requests.send(RuntimeError(f"{type(error).__name__}: {error}"))
    except EOFError:
        engine.close()
