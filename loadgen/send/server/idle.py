"""Waits until a server is idle, so that a trial is not affected by the one before it.

Servers do not report whether they are idle, so a small request is sent repeatedly. The server is busy while
the response takes much longer than it did at first. The small requests share no prefix with any plan or each
other.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass
from statistics import median

from loadgen.loadgen_errors import LoadgenError
from loadgen.plan.plan import Generated, Plan, PlannedRequest, Vocabulary
from loadgen.send.client import send_once
from loadgen.send.prompts import new_prompts
from loadgen.send.target import Target, new_client
from loadgen.send.timers import now_s

PROMPT_TOKENS, ANSWER_TOKENS = 16, 4
FIRST_LOOKS = 3
SLOWER, SLOWER_S = 2.0, 0.05
"""An idle server responds within the first response time times SLOWER, plus SLOWER_S."""
EVERY_S = 0.5
"""Pause between two small requests, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleResult:
    """Result of a wait: its duration, and whether the server became idle in time."""

    waited_s: float
    is_idle: bool


class IdleWatch:
    """Measures whether one server is idle. `vocabulary` is that of the plans sent to it."""

    def __init__(self, target: Target, vocabulary: Vocabulary, *, limit_s: float) -> None:
        self._target = target
        self._limit_s = limit_s
        request = PlannedRequest(
            index=0,
            at_s=0.0,
            segments=(Generated(segment_id=0, num_tokens=PROMPT_TOKENS),),
            output_tokens=ANSWER_TOKENS,
        )
        self._plan = Plan(name="idle?", seed=secrets.randbits(62), vocabulary=vocabulary, requests=(request,))
        self._num_asked = 0
        self._idle_s: float | None = None

    def wait(self) -> IdleResult:
        """Wait until the server is idle or `limit_s` have passed.

        The first call assumes an idle server and measures its response time. It raises LoadgenError if there
        is no response.
        """
        return asyncio.run(self._wait())

    async def _wait(self) -> IdleResult:
        began_s = now_s()
        if self._idle_s is None:
            self._idle_s = median([await self._first_look() for _ in range(FIRST_LOOKS)])
            return IdleResult(waited_s=now_s() - began_s, is_idle=True)
        bound_s = SLOWER * self._idle_s + SLOWER_S
        while True:
            left_s = self._limit_s - (now_s() - began_s)
            took_s, _ = await self._ask(max(min(left_s, 10 * bound_s), bound_s))
            if took_s is not None and took_s <= bound_s:
                return IdleResult(waited_s=now_s() - began_s, is_idle=True)
            if left_s <= EVERY_S:
                return IdleResult(waited_s=now_s() - began_s, is_idle=False)
            await asyncio.sleep(EVERY_S)

    async def _first_look(self) -> float:
        took_s, error = await self._ask(self._limit_s)
        if took_s is None:
            raise LoadgenError(
                f"{', '.join(self._target.urls)} did not complete a request of {PROMPT_TOKENS} tokens: {error}"
            )
        return took_s

    async def _ask(self, timeout_s: float) -> tuple[float | None, str]:
        """Send a small request and return (seconds, "") or (None, error)."""
        self._num_asked += 1
        client = new_client(self._target, max_connections=4)
        try:
            await client.open()
            asked = new_prompts(self._plan, self._target).warm_up(self._num_asked, self._plan.requests[0])
            began_s = now_s()
            exchange = await send_once(client, asked, timeout_s)
            if exchange.is_successful:
                return now_s() - began_s, ""
            status = f"status {exchange.status}: " if exchange.status not in (None, 200) else ""
            return None, status + (exchange.error or "the response was cut short")
        except LoadgenError as error:
            return None, str(error)
        finally:
            await client.aclose()
