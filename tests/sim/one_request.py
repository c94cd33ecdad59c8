"""Sends one request to a simulated cluster and returns what its client received."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from baton.core.client_api import Caller, ChoiceDelta, Timeline
from baton.gateway.input.client_call import Endpoint
from baton.sim.sim_cluster import SimCluster

PROMPT_TOKENS = 100


@dataclass(slots=True)
class Answer:
    """The tokens and the timeline of one request."""

    token_ids: list[int] = field(default_factory=list)
    timeline: Timeline | None = None

    async def begin(self) -> None:
        """Prepare nothing."""

    def put(self, choice: ChoiceDelta) -> None:
        self.token_ids += choice.token_ids

    @property
    def known_timeline(self) -> Timeline:
        assert self.timeline is not None
        return self.timeline

    @property
    def pulled_bytes(self) -> int:
        """KV bytes that were read from another worker."""
        return sum(leg.kv_bytes for leg in self.known_timeline.legs)


async def ask(cluster: SimCluster, number: int, **body: Any) -> Answer:
    """Run the request of this number to its end. Its prompt and its tokens depend only on the number."""
    fields = {
        "prompt": [1 + (number * 7 + index) % 200 for index in range(PROMPT_TOKENS)],
        "max_tokens": 8,
        "ignore_eos": True,
        "timeline": True,
        "seed": number,
    }
    answer, received_s = Answer(), asyncio.get_running_loop().time()
    call = await cluster.gateway.validator.call(Endpoint.COMPLETIONS, fields | body, Caller(), received_s=received_s)
    ending = await cluster.gateway.run(call, answer)
    (answer.timeline,) = ending.timeline
    return answer
