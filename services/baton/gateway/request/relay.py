"""The path of a request, in one function."""

from typing import Protocol

from baton.core.cluster.placement import Placement
from baton.core.request import TokenDelta
from baton.gateway.request.attempt import Attempt
from baton.gateway.request.delivery import Delivery
from baton.gateway.request.worker_sessions import WorkerSessions


class TokenSink(Protocol):
    """Where a request's tokens go: text is made there."""

    def put(self, delta: TokenDelta) -> bool:
        """Never waits. Whether the sample has ended with this, which only its text tells (a stop string).
        Raises Refused when full."""
        ...


class Placer(Protocol):
    """Who says where an attempt runs."""

    async def place(self, attempt: Attempt) -> Placement:
        """Raises Refused when nobody may or can run it."""
        ...


async def relay(
    attempt: Attempt, progress: Delivery, scheduler: Placer, workers: WorkerSessions, out: TokenSink
) -> None:
    """One attempt: client → scheduler → prefill ∥ decode → out. Cancelling this coroutine cancels both legs;
    a lost leg raises LegLost."""
    placement = await scheduler.place(attempt)  # who prefills, who decodes, and why
    async with workers.open(
        attempt, placement, progress
    ) as legs:  # both jobs leave together; leaving cancels what still runs
        while not legs.finished:  # until every sample of the request has ended
            delta = await legs.next()  # from either leg, each output_index once
            if out.put(delta):  # never waits: a full sink ends the request
                legs.end_sample(delta.sample_index)
