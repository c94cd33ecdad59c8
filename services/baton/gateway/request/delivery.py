"""Tokens of one request that were delivered to the client.

Every token is delivered once and in order, even if attempts fail, workers repeat tokens, or messages arrive
twice.
"""

import asyncio
from array import array
from collections.abc import Iterable, Mapping

from baton.core.ids import JobId
from baton.core.kv.block_hash import TokenIds
from baton.core.request import LegTimeline, PromptLogprobs, TokenDelta, Usage
from baton.gateway.cluster.attempt_errors import ConflictingTokens
from baton.gateway.request.latency import TokenLatency


class Delivery:
    """Delivered tokens of one request's samples, over all attempts.

    tokens: delivered tokens by sample index.
    open: indices of the samples that have not ended.
    latency: delivery times of the tokens.
    prompt_logprobs: of the prompt, if the request asks for them and they have arrived.
    legs, usages: timelines and usage that workers reported, by job.
    """

    __slots__ = ("latency", "legs", "open", "prompt_logprobs", "tokens", "usages")

    def __init__(self, sample_indices: Iterable[int]) -> None:
        self.tokens: dict[int, TokenIds] = {index: array("I") for index in sample_indices}
        self.open: set[int] = set(self.tokens)
        self.latency = TokenLatency()
        self.prompt_logprobs: PromptLogprobs | None = None
        self.legs: dict[JobId, list[LegTimeline]] = {}
        self.usages: dict[JobId, Usage] = {}

    def accept(self, delta: TokenDelta) -> TokenDelta | None:
        """Return the part of `delta` that was not delivered before, or None if there is none.

        Raises ConflictingTokens if `delta` leaves a gap or differs from tokens that were already delivered.
        """
        self._record_usage(delta)
        self.prompt_logprobs = self.prompt_logprobs or delta.prompt_logprobs
        have = self.tokens.get(delta.sample_index)
        if have is None or delta.sample_index not in self.open:
            return None
        if delta.output_index != len(have):
            delta = _without_delivered_tokens(delta, have)
        if not delta.token_ids and delta.finish is None:
            return None
        self.latency.record(delta.sample_index, len(delta.token_ids), asyncio.get_running_loop().time())
        have.extend(delta.token_ids)
        if delta.finish is not None:
            self.open.discard(delta.sample_index)
        return delta

    def end(self, sample_index: int) -> None:
        """Mark a sample as ended by the gateway itself, for example at a stop string."""
        self.open.discard(sample_index)

    def all_past(self, num_tokens: int, sample_indices: frozenset[int]) -> bool:
        """True if each of these samples has ended or has more than `num_tokens` tokens.

        An attempt that replays `num_tokens` outputs then no longer needs its prefill job.
        """
        return all(len(self.tokens[index]) > num_tokens for index in self.open & sample_indices)

    @property
    def cached_tokens_by_tier(self) -> Mapping[str, int]:
        """Prompt tokens whose KV was reused, by cache tier, in the first attempt that reported it."""
        first = next(iter(self.usages.values()), None)
        return {} if first is None else first.num_cached_tokens

    @property
    def num_cached_tokens(self) -> int:
        """Sum of `cached_tokens_by_tier`."""
        return sum(self.cached_tokens_by_tier.values())

    def cached_tokens_of(self, job: JobId) -> dict[str, int]:
        """Prompt tokens whose KV was reused, by cache tier, in one attempt."""
        usage = self.usages.get(job)
        return usage.num_cached_tokens if usage else {}

    def _record_usage(self, delta: TokenDelta) -> None:
        """Store the reported timeline and usage. A decode worker repeats the report of the prefill worker."""
        if delta.timeline is not None:
            legs = self.legs.setdefault(delta.job, [])
            if delta.timeline not in legs:
                legs.append(delta.timeline)
        if delta.usage is not None:
            self.usages.setdefault(delta.job, delta.usage)


def _without_delivered_tokens(delta: TokenDelta, have: TokenIds) -> TokenDelta:
    """Return `delta` without the tokens that were delivered already."""
    begin, num_known = delta.output_index, len(have) - delta.output_index
    if num_known < 0:
        raise ConflictingTokens(
            f"{delta.job}: sample {delta.sample_index} continues at token {begin}, but only {len(have)} were delivered"
        )
    known = delta.token_ids[:num_known]
    if known != tuple(have[begin : begin + len(known)]):
        raise ConflictingTokens(
            f"{delta.job}: sample {delta.sample_index} has other tokens from index {begin} on than were delivered"
        )
    return TokenDelta(
        job=delta.job,
        sample_index=delta.sample_index,
        output_index=len(have),
        token_ids=delta.token_ids[num_known:],
        logprobs=delta.logprobs[num_known:],
        finish=delta.finish,
        usage=delta.usage,
        timeline=delta.timeline,
    )
