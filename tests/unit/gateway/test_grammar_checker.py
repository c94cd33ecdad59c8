"""Grammar checks: the queue against a scripted child, and the limits of the real one."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from baton.core.errors import Reason, Refused
from baton.gateway.constraints.lark_writer import WrittenGrammar
from baton.gateway.grammar_checks.grammar_checker import JOB_BYTES, GrammarChecker, GrammarCheckLimits
from baton.gateway.grammar_checks.tenant_queue import TenantQueue
from baton.gateway.input.answers.answer_grammar import AnswerGrammar
from baton.model.loading.model_source import DEMO_DIR
from baton.runtime.observability.metrics import GrammarMetrics
from tests.demo_vocabulary import DEMO_VOCAB_SIZE

_CHILD = """
import json, os, struct, sys, time
def put(problem):
    reply = json.dumps(problem).encode()
    sys.stdout.buffer.write(struct.pack("<I", len(reply)) + reply)
    sys.stdout.buffer.flush()
put(None)
while header := sys.stdin.buffer.read(4):
    text = sys.stdin.buffer.read(struct.unpack("<I", header)[0]).decode()
    if text.startswith("hang"):
        time.sleep(600)
    if text == "die":
        sys.exit(1)
    if text.startswith("log "):
        with open(os.environ["BATON_TEST_LOG"], "a") as log:
            log.write(text + chr(10))
    if text.startswith("gate "):
        open(text[5:]).read()  # a fifo: waits until the test writes
    put({"message": "bad", "rule": "", "where": ""} if text == "bad" else None)
"""
_REAL = [
    *(sys.executable, "-P", "-m", "baton.gateway.grammar_checks.grammar_compiler"),
    *(str(DEMO_DIR), str(DEMO_VOCAB_SIZE)),
]
_MEMORY = str(64 << 20)
VALID = '%llguidance {}\nstart: "a"\n'
_HUGE = "%llguidance {}\nstart: T\nT: " + " & ".join(f"/.*a.{{{n}}}b.*/" for n in range(1, 60)) + "\n"
"""Takes minutes, and gigabytes."""
_LARGE = '%llguidance {}\nstart: r0\nr0: %json {"type":"integer","multipleOf":1000003}\n'
"""Takes 290 MB."""


def scripted(child: str = _CHILD) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", child]


class Checks:
    """A checker, and the reasons of its refusals."""

    def __init__(self, argv: list[str], limits: GrammarCheckLimits) -> None:
        self.registry = CollectorRegistry()
        self.checker = GrammarChecker(argv, GrammarMetrics(self.registry), limits)

    async def reason(self, text: str, tenant: str = "a") -> Reason | None:
        try:
            await self.checker.check(AnswerGrammar(WrittenGrammar(text), "f"), tenant)
        except Refused as refused:
            return refused.failure.reason
        return None

    def count(self, outcome: str) -> float | None:
        return self.registry.get_sample_value("baton_grammar_checks_total", {"outcome": outcome})


@asynccontextmanager
async def checks(argv: list[str], **limits: float) -> AsyncIterator[Checks]:
    opened = Checks(argv, GrammarCheckLimits(**{"compile_s": 30.0} | limits))  # type: ignore[arg-type]
    try:
        yield opened
    finally:
        await opened.checker.aclose()


@pytest.mark.fault("F-53", "F-54")
@pytest.mark.parametrize("bad", ["bad", "hang", "die"])
async def test_a_bad_grammar_does_not_fail_those_that_wait(bad: str) -> None:
    async with checks(scripted(), compile_s=1.0 if bad == "hang" else 30.0) as opened:
        reasons = await asyncio.gather(*map(opened.reason, ("ok1", bad, "ok2")))
        assert reasons == [None, Reason.INVALID_GRAMMAR, None]
        assert opened.count("valid") == 2
        assert opened.count("invalid" if bad == "bad" else "too_expensive") == 1


async def test_the_queue_is_bounded_and_equal_grammars_share_a_place() -> None:
    async with checks(scripted(), max_waiting_bytes=JOB_BYTES + 8) as opened:
        reasons = await asyncio.gather(*map(opened.reason, ("ok1", "ok1", "ok2")))
        assert reasons == [None, None, Reason.QUEUE_FULL]
        assert opened.count("queue_full") == 1
        assert await opened.reason("ok1") is None
        assert opened.count("known") == 1


async def test_each_tenant_has_a_share_of_the_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One tenant fills its share; another is served after one grammar of the first, not after all."""
    log, fifo = tmp_path / "log", tmp_path / "fifo"
    monkeypatch.setenv("BATON_TEST_LOG", str(log))
    os.mkfifo(fifo)
    async with checks(scripted(), max_waiting_bytes_of_tenant=3 * (JOB_BYTES + 8)) as opened:
        first = asyncio.create_task(opened.reason(f"gate {fifo}"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)  # its compile has begun
        hostile = [asyncio.create_task(opened.reason(f"log a{number}")) for number in range(4)]
        await asyncio.sleep(0)
        other = asyncio.create_task(opened.reason("log b", "b"))
        await asyncio.sleep(0)
        await asyncio.to_thread(fifo.write_text, "go")
        assert await asyncio.gather(first, *hostile, other) == [None, None, None, None, Reason.QUEUE_FULL, None]
    assert log.read_text().split("\n")[:4] == ["log b", "log a0", "log a1", "log a2"]


@pytest.mark.fault("F-54")
async def test_a_child_that_cannot_start_gives_a_typed_failure() -> None:
    async with checks(scripted("raise SystemExit(1)"), max_deaths=2) as opened:
        assert await asyncio.gather(*map(opened.reason, ("1", "2", "3"))) == [Reason.QUEUE_FULL] * 3
        assert opened.registry.get_sample_value("baton_grammar_compiler_deaths_total") == 2
        assert opened.count("unavailable") == 3


async def test_wait_for_a_grammar_is_bounded() -> None:
    """Without the bound the first would end with `INVALID_GRAMMAR`, and the others wait for that."""
    async with checks(scripted(), compile_s=3.0, wait_s=0.05) as opened:
        assert await asyncio.gather(*map(opened.reason, ("hang", "hang2", "bad"))) == [Reason.QUEUE_FULL] * 3
        assert opened.count("timeout") == 3


async def test_closing_refuses_those_that_wait() -> None:
    async with checks(scripted()) as opened:
        assert await opened.reason("ok1") is None
        waiting = [asyncio.create_task(opened.reason(text)) for text in ("hang", "ok2")]
        await asyncio.sleep(0)
        await opened.checker.aclose()
        assert await asyncio.wait_for(asyncio.gather(*waiting), 5.0) == [Reason.QUEUE_FULL] * 2
        assert await opened.reason("ok") is Reason.QUEUE_FULL


async def test_kept_results_are_bounded_in_bytes() -> None:
    async with checks(scripted(), cache_bytes=4000) as opened:
        for number in range(30):
            assert await opened.reason(f"ok{number}") is None
        assert 3000 < opened.checker.num_bytes <= 4000
        assert await opened.reason("ok29") is None
        assert opened.count("known") == 1
        assert await opened.reason("ok0") is None
        assert opened.count("known") == 1


def test_queue_shares_time_not_places() -> None:
    queue: TenantQueue[int] = TenantQueue()
    for number in range(3):
        queue.put("slow", number)
        queue.put("fast", number)
    taken = []
    while len(queue):
        tenant, _ = queue.take()
        queue.charge(tenant, 2.0 if tenant == "slow" else 0.5)
        taken.append(tenant)
    assert taken == ["slow", "fast", "fast", "fast", "slow", "slow"]
    queue.put("new", 0)
    queue.put("slow", 0)
    assert queue.take()[0] == "new"


async def test_real_child_is_bounded_in_memory_and_time_and_is_replaced() -> None:
    async with checks([*_REAL, _MEMORY], wait_s=60.0) as opened:
        assert await opened.reason(VALID) is None
        first = opened.checker._compiler.pid
        assert await opened.reason(_LARGE) is Reason.INVALID_GRAMMAR
        assert opened.registry.get_sample_value("baton_grammar_compiler_deaths_total") == 1
        assert await opened.reason(VALID + "x: /a/\n") is None
        assert opened.checker._compiler.pid not in (None, first)
        opened.checker._limits = GrammarCheckLimits(compile_s=0.1)
        assert await opened.reason(_HUGE) is Reason.INVALID_GRAMMAR
        assert opened.registry.get_sample_value("baton_grammar_compiler_deaths_total") == 2
        assert opened.checker._compiler.pid is None
