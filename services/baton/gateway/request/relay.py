"""Runs one attempt of a request, from its placement to its last token, in one function."""

from typing import Protocol

from baton.core.cluster.placement import Placement
from baton.core.request import TokenDelta
from baton.gateway.request.attempt import Attempt
from baton.gateway.request.delivery import Delivery
from baton.gateway.request.worker_sessions import WorkerSessions


class TokenSink(Protocol):
    """Receives a request's new tokens, and turns them into text."""

    def put(self, delta: TokenDelta) -> bool:
        """Take new tokens without waiting. Return True if a stop string has ended the sample.

        Raises Refused if the client has left too much of the response unread.
        """
        ...


class Placer(Protocol):
    """Chooses the workers for an attempt."""

    async def place(self, attempt: Attempt) -> Placement:
        """Return the workers that run this attempt. Raises Refused if none can or may run it."""
        ...


async def relay(attempt: Attempt, delivery: Delivery, placer: Placer, workers: WorkerSessions, out: TokenSink) -> None:
    """Run one attempt: place it, send its jobs to the workers, and pass each new token to `out`.

    Returns when every sample of the attempt has ended. Cancelling this coroutine cancels the jobs. Raises
    AttemptFailed if another attempt may succeed, and Refused if none can.
    """
    placement = await placer.place(attempt)  # which workers prefill and decode
    async with workers.open(attempt, placement, delivery) as jobs:  # sends both jobs; leaving cancels what still runs
        while not jobs.finished:
            delta = await jobs.next()  # from either worker; each output index is returned once
            if out.put(delta):
                jobs.end_sample(delta.sample_index)
