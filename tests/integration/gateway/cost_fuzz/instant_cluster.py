"""Serves a stub scheduler and a stub hybrid worker that answer immediately, with the limits of a large model.

Run with `python -m`; prints the address. Each step brings one token of each sample, as a real worker's does.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from baton.core.cluster.placement import Placement, PlacementQuery, Rejection, StillWaiting
from baton.core.messages.jobs import DecodeJob, PrefillJob
from baton.core.request import RequestActuals, TokenDelta
from tests.integration.gateway.stub_cluster import serve_stubs
from tests.unit.gateway.fakes import ALPHABET, StubScheduler, StubWorker, token_at

MAX_MODEL_LEN = 2**17
MAX_NUM_SEQS = 128
BLOCK_SIZE_TOKENS = 16
MAX_KEPT_JOBS = 256
MAX_ANSWER_TOKENS = 4500
MAX_UNACKNOWLEDGED = 512


class InstantWorker(StubWorker):
    """A stub worker that forgets old jobs, and waits for a gateway that does not acknowledge its steps."""

    def _delta(self, job: PrefillJob | DecodeJob, sample: int, begin: int, count: int) -> TokenDelta:
        """Return the next tokens. Like a model, it ends long answers by itself."""
        self.finish_at = MAX_ANSWER_TOKENS if job.sampling.max_tokens > MAX_ANSWER_TOKENS else None
        return super()._delta(job, sample, begin, count)

    def _take(self, message: Any, session: Any) -> None:
        super()._take(message, session)
        del self.jobs[:-MAX_KEPT_JOBS], self.cancels[:-MAX_KEPT_JOBS]

    async def _wait_paused(self) -> None:
        while any(len(session.kept) > MAX_UNACKNOWLEDGED for session in self._sessions.values()):  # noqa: ASYNC110
            await asyncio.sleep(0.001)


class InstantScheduler(StubScheduler):
    """A stub scheduler that forgets queries and outcomes."""

    async def place(self, query: PlacementQuery) -> Placement | Rejection | StillWaiting:
        self.queries.clear()
        return await super().place(query)

    async def finished(self, *actuals: RequestActuals) -> None:
        pass


def quick_token(prompt: Sequence[int], sample: int, index: int) -> int:
    """Return `token_at` for a short prompt, and a letter that takes no time for others."""
    return token_at(prompt, sample, index) if len(prompt) <= 16 else ALPHABET[(sample + index) % len(ALPHABET)]


if __name__ == "__main__":
    asyncio.run(
        serve_stubs(
            InstantWorker,
            InstantScheduler,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=MAX_NUM_SEQS,
            tokens_a_step=1,
            token_at=quick_token,
            block_size_tokens=BLOCK_SIZE_TOKENS,
        )
    )
