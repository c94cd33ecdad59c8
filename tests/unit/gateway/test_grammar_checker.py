"""Grammar checks against a scripted child."""

import asyncio
import sys
from collections.abc import Awaitable

import pytest

from baton.core.errors import Reason, Refused
from baton.gateway.grammar_checks.grammar_checker import GrammarChecker, GrammarCheckLimits

_CHILD = """
import json, struct, sys, time
def put(message):
    reply = json.dumps(message).encode()
    sys.stdout.buffer.write(struct.pack("<I", len(reply)) + reply)
    sys.stdout.buffer.flush()
put("")
while header := sys.stdin.buffer.read(4):
    text = sys.stdin.buffer.read(struct.unpack("<I", header)[0]).decode()
    if text == "hang":
        time.sleep(600)
    if text == "die":
        sys.exit(1)
    put("" if text.startswith("ok") else "bad")
"""


def _results(grammars: list[str], limits: GrammarCheckLimits, child: str = _CHILD) -> list[Reason | None]:
    async def main() -> list[Reason | None]:
        checker = GrammarChecker([sys.executable, "-I", "-S", "-c", child], limits)
        try:
            return await asyncio.gather(*(_reason(checker.check(grammar, "f")) for grammar in grammars))
        finally:
            await checker.aclose()

    return asyncio.run(main())


async def _reason(check: Awaitable[None]) -> Reason | None:
    try:
        await check
    except Refused as refused:
        return refused.failure.reason
    return None


@pytest.mark.parametrize("bad", ["bad", "hang", "die"])
def test_a_bad_grammar_does_not_fail_those_that_wait(bad: str) -> None:
    limits = GrammarCheckLimits(compile_s=1.0 if bad == "hang" else 30.0)
    assert _results(["ok1", bad, "ok2"], limits) == [None, Reason.INVALID_GRAMMAR, None]


def test_the_queue_is_bounded_and_equal_grammars_share_a_place() -> None:
    limits = GrammarCheckLimits(compile_s=30.0, max_waiting=1)
    assert _results(["ok1", "ok1", "ok2"], limits) == [None, None, Reason.QUEUE_FULL]


def test_a_child_that_cannot_start_gives_a_typed_failure() -> None:
    assert _results(["ok1"] * 2, GrammarCheckLimits(), "raise SystemExit(1)") == [Reason.QUEUE_FULL] * 2


def test_wait_for_a_grammar_is_bounded() -> None:
    async def main() -> None:
        limits = GrammarCheckLimits(compile_s=30.0, wait_s=0.05)
        checker = GrammarChecker([sys.executable, "-I", "-S", "-c", _CHILD], limits)
        try:
            checks = [_reason(checker.check(grammar, "f")) for grammar in ("hang", "hang2", "die")]
            assert await asyncio.gather(*checks) == [Reason.QUEUE_FULL] * 3
        finally:
            await checker.aclose()

    asyncio.run(main())
