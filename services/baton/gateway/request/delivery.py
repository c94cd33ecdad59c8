"""What the client already has of one request. It makes lost legs, retries and doubled messages safe: each
token goes out once, in order."""

import asyncio
from array import array
from collections.abc import Iterable, Mapping

from baton.core.ids import JobId
from baton.core.kv.block_hash import TokenIds
from baton.core.request import LegTimeline, TokenDelta, Usage
from baton.gateway.cluster.attempt_errors import Contradiction
from baton.gateway.request.latency import TokenLatency


class Delivery:
    """The samples of one request over all its attempts. `tokens[i]`: those of sample i that were delivered;
    `open`: samples that go on; `legs`, `usages`: what the workers said of each attempt's job."""

    __slots__ = ("legs", "open", "pace", "tokens", "usages")

    def __init__(self, sample_indices: Iterable[int]) -> None:
        self.tokens: dict[int, TokenIds] = {index: array("I") for index in sample_indices}
        self.open: set[int] = set(self.tokens)
        self.pace = TokenLatency()
        self.legs: dict[JobId, list[LegTimeline]] = {}
        self.usages: dict[JobId, Usage] = {}

    def take(self, delta: TokenDelta) -> TokenDelta | None:
        """The part of `delta` that is new, or None. Raises Contradiction when it neither goes on from nor
        repeats what was delivered."""
        self._note(delta)
        have = self.tokens.get(delta.sample_index)
        if have is None or delta.sample_index not in self.open:
            return None
        if delta.output_index != len(have):
            delta = _rest_of(delta, have)
        if not delta.token_ids and delta.finish is None:
            return None
        self.pace.took(delta.sample_index, len(delta.token_ids), asyncio.get_running_loop().time())
        have.extend(delta.token_ids)
        if delta.finish is not None:
            self.open.discard(delta.sample_index)
        return delta

    def end(self, sample_index: int) -> None:
        """The sample has ended for a reason that only the gateway sees."""
        self.open.discard(sample_index)

    def all_beyond(self, num_tokens: int, sample_indices: frozenset[int]) -> bool:
        """Whether each of these samples has ended or has more tokens than that: an attempt that replays them
        needs no prefill any more."""
        return all(len(self.tokens[index]) > num_tokens for index in self.open & sample_indices)

    @property
    def cached_tokens_by_tier(self) -> Mapping[str, int]:
        """Of the prompt, at the first attempt that computed it: what the client did not wait for, by where it
        lay."""
        first = next(iter(self.usages.values()), None)
        return {} if first is None else first.num_cached_tokens

    @property
    def num_cached_tokens(self) -> int:
        return sum(self.cached_tokens_by_tier.values())

    def num_cached_tokens_of(self, job: JobId) -> int:
        usage = self.usages.get(job)
        return sum(usage.num_cached_tokens.values()) if usage else 0

    def _note(self, delta: TokenDelta) -> None:
        """Who decodes repeats what the prefill leg said of itself."""
        if delta.timeline is not None:
            legs = self.legs.setdefault(delta.job, [])
            if delta.timeline not in legs:
                legs.append(delta.timeline)
        if delta.usage is not None:
            self.usages.setdefault(delta.job, delta.usage)


def _rest_of(delta: TokenDelta, have: TokenIds) -> TokenDelta:
    """`delta` without the tokens that were delivered already."""
    begin, num_known = delta.output_index, len(have) - delta.output_index
    if num_known < 0:
        raise Contradiction(
            f"{delta.job}: sample {delta.sample_index} goes on at token {begin}, but {len(have)} were delivered"
        )
    known = delta.token_ids[:num_known]
    if known != tuple(have[begin : begin + len(known)]):
        raise Contradiction(
            f"{delta.job}: sample {delta.sample_index} repeats other tokens from {begin} on than were delivered"
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
