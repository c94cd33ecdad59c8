"""Repeats each request of a run alone, one after the other, and compares the responses.

With greedy decoding the tokens must be the same as under load. Differences mean that load changed a response:
batching can change rounding now and then, mixed-up KV cache blocks change many responses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from loadgen.measure.records import Record
from loadgen.plan.plan import AnswerOf, Plan
from loadgen.send.client import send_once
from loadgen.send.prompts import EarlierResponse, new_prompts
from loadgen.send.target import Target, new_client


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseDifference:
    """A response that differed when its request was repeated.

    - `index`: position of the request in the plan
    - `at`: index of the first output token that differs
    """

    index: int
    at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RecheckResult:
    """Result of repeating requests.

    - `compared`: responses that were compared
    - `failed`: requests without a complete response this time
    - `skipped`: responses without token ids
    - `differing`: those that differ
    """

    compared: int
    failed: int
    skipped: int
    differing: tuple[ResponseDifference, ...]

    @property
    def is_same(self) -> bool:
        """True if at least one response was compared and none failed or differed."""
        return bool(self.compared) and not self.failed and not self.differing

    def to_json(self) -> dict[str, Any]:
        return {
            "compared": self.compared,
            "failed": self.failed,
            "skipped": self.skipped,
            "differing": [{"index": one.index, "at": one.at} for one in self.differing],
        }

    def __str__(self) -> str:
        words = [
            f"{len(self.differing)} of {self.compared} responses differ when the requests are repeated one at a time"
        ]
        if self.differing:
            first = self.differing[0]
            words.append(f"first in request {first.index} at output token {first.at}")
        words += [f"{self.failed} had no complete response this time"] if self.failed else []
        words += [f"{self.skipped} could not be compared, because they have no token ids"] if self.skipped else []
        return "; ".join(words)


async def check(
    plan: Plan, target: Target, records: Sequence[Record], progress: Callable[[int, int], None]
) -> RecheckResult:
    """Repeat the requests that have a complete response in `records`.

    `progress` is called with (done, total). Raises LoadgenError if the server cannot be reached.
    """
    complete = [record for record in records if record.is_complete and not record.error]
    by_index = {record.index: record for record in complete}
    answers = {record.index: EarlierResponse(token_ids=record.token_ids, text="") for record in complete}
    prompts = new_prompts(plan, target)
    uses_texts = target.api == "chat" or target.prompts == "text"
    client = new_client(target)
    differing: list[ResponseDifference] = []
    num_compared = num_failed = num_skipped = 0
    await client.open()
    try:
        for done, index in enumerate(sorted(by_index)):
            progress(done, len(by_index))
            record, request = by_index[index], plan.requests[index]
            if not record.token_ids or (uses_texts and any(isinstance(s, AnswerOf) for s in request.segments)):
                num_skipped += 1
                continue
            exchange = await send_once(client, prompts.resolve(request, answers), target.timeout_s)
            if not exchange.is_successful:
                num_failed += 1
                continue
            num_compared += 1
            at = first_difference(record.token_ids, exchange.token_ids)
            if at is not None:
                differing.append(ResponseDifference(index=index, at=at))
    finally:
        await client.aclose()
    return RecheckResult(compared=num_compared, failed=num_failed, skipped=num_skipped, differing=tuple(differing))


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the first index at which two responses differ, or None if they are equal."""
    for at, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return at
    return None if len(one) == len(other) else min(len(one), len(other))
