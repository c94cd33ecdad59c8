"""A pair of workers, and a third worker that holds the prefix of a prompt."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from baton.core.messages.jobs import DecodeJob, PrefillJob, PrefixSource
from baton.core.request import Sampling
from baton.sim.sim_transfer_backend import LinkModel
from tests import builders
from tests.unit.worker.harness import Node, Pair, expected_tokens, pair
from tests.unit.worker.job_builders import decode_job, prefill_job
from tests.unit.worker.scripted_gateway import Gateway

NUM_TOKENS = 82
NUM_BLOCKS = 20
"""Number of full blocks before the last token of the prompt."""
PROMPT = b"prompt-0"
BLOCK_BYTES = builders.layout().block_bytes


class Trio:
    """A pair of workers, and a third worker that holds the prefix of a prompt."""

    def __init__(self, workers: Pair, holder: Node, to_holder: Gateway) -> None:
        self.pair, self.holder, self.to_holder = workers, holder, to_holder
        self.p, self.d, self.to_p, self.to_d = workers.p, workers.d, workers.to_p, workers.to_d

    async def hold(self, num_tokens: int = NUM_TOKENS, *, prompt: bytes = PROMPT, **changes: Any) -> None:
        """Let the holder compute that much of the prompt of this name."""
        ids = prefill_job(NUM_TOKENS, request=prompt).token_ids[:num_tokens]
        fields = {"request": b"earlier " + prompt, "token_ids": ids, "sampling": Sampling(max_tokens=1)}
        job = decode_job(num_tokens, **(fields | changes))
        self.to_holder.send(job)
        await self.to_holder.ended(job.job)

    def jobs(self, number: int = 0, *, prompt: bytes = PROMPT, **changes: Any) -> tuple[PrefillJob, DecodeJob]:
        """Send both jobs of a request; the prefill job names the holder as prefix source."""
        fields = self._fields(number, prompt) | changes
        source = fields.pop("prefix_source", self.source())
        return prefill_job(reader=self.d.ref, prefix_source=source, **fields), decode_job(owner=self.p.ref, **fields)

    def source(self, num_blocks: int = NUM_BLOCKS) -> PrefixSource:
        return PrefixSource(worker=self.holder.ref, num_blocks=num_blocks)

    def send(self, number: int = 0, **changes: Any) -> tuple[PrefillJob, DecodeJob]:
        prefill, decode = self.jobs(number, **changes)
        self.to_p.send(prefill)
        self.to_d.send(decode)
        return prefill, decode

    def send_local(self, number: int = 0, *, prompt: bytes = PROMPT, **changes: Any) -> DecodeJob:
        """Send a local decode job that names the holder as prefix source."""
        job = decode_job(**({"prefix_source": self.source()} | self._fields(number, prompt) | changes))
        self.to_d.send(job)
        return job

    async def answered(self, prefill: PrefillJob, decode: DecodeJob) -> int:
        """Check that the answer is exact. Returns how many prompt tokens the prefill worker reused."""
        first = await self.to_p.ended_prefill(prefill.job)
        await self.to_d.ended(decode.job)
        assert self.to_d.tokens(decode.job) == expected_tokens(decode)
        assert first.timeline is not None
        assert first.timeline.num_computed_tokens + first.timeline.num_cached_tokens == NUM_TOKENS
        return first.timeline.num_cached_tokens

    async def answered_locally(self, job: DecodeJob) -> int:
        """Check that the answer is exact. Returns how many prompt tokens the decode worker reused."""
        deltas = await self.to_d.ended(job.job)
        assert self.to_d.tokens(job.job) == expected_tokens(job)
        timeline, usage = deltas[-1].timeline, deltas[0].usage
        assert timeline is not None
        assert usage is not None
        assert timeline.num_computed_tokens + timeline.num_cached_tokens == NUM_TOKENS
        assert sum(usage.num_cached_tokens.values()) == timeline.num_cached_tokens
        return timeline.num_cached_tokens

    def _fields(self, number: int, prompt: bytes) -> dict[str, Any]:
        tokens = prefill_job(NUM_TOKENS, request=prompt).token_ids
        return {"request": b"request-%d" % number, "token_ids": tokens, "num_prompt_tokens": NUM_TOKENS}

    @property
    def computed_tokens(self) -> int:
        return sum(plan.num_tokens for plan in self.p.executor.plans)


@asynccontextmanager
async def trio(
    *, link: LinkModel | None = None, p_blocks: int = 128, kv_windows: tuple[int, ...] = (0, 0), **changes: Any
) -> AsyncIterator[Trio]:
    async with pair(num_blocks=128, p_blocks=p_blocks, link=link, kv_windows=kv_windows, **changes) as workers:
        holder = workers.cluster.start(
            "h", num_blocks=128, max_num_batched_tokens=64, max_num_seqs=16, kv_windows=kv_windows
        )
        to_holder = workers.cluster.gateway(holder)
        await to_holder.connect()
        yield Trio(workers, holder, to_holder)
        await workers.until_clean()
