"""Constrained answers in a simulated cluster: equal on any workers, and after a worker is killed at any
token."""

import asyncio
import re
from dataclasses import dataclass, field, replace

import pytest
from llguidance import LLMatcher

from baton.core.client_api import Caller, ChoiceDelta
from baton.core.cluster.worker_report import WorkerRole
from baton.core.errors import Code, Reason, Refused
from baton.gateway.input.client_call import Endpoint
from baton.sim import virtual_time
from baton.sim.sim_cluster import SimCluster, SimModel
from tests.sim.storm_cluster import config

pytestmark = pytest.mark.sim

MODEL = SimModel()
END = MODEL.vocab_size - 1
PATTERN = rb'\{"id":[1-9][0-9]{0,3}(,"[a-c]{1,2}":(true|false)){1,3}\}'
GRAMMAR = str(LLMatcher.grammar_from_regex(PATTERN.decode()))
NUM_SAMPLES = 2


@dataclass(slots=True)
class Receiver:
    """A client that kills the decode workers once, when the first choice has `kill_after` tokens."""

    cluster: SimCluster
    kill_after: int | None = None
    tokens: dict[int, list[int]] = field(default_factory=dict)
    killing: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Prepare nothing."""

    def put(self, choice: ChoiceDelta) -> None:
        own = self.tokens.setdefault(choice.index, [])
        own += choice.token_ids
        if choice.index == 0 and self.kill_after is not None and len(own) >= self.kill_after and not self.killing:
            self.killing = asyncio.create_task(self._kill())

    async def _kill(self) -> None:
        names = [name for name, worker in self.cluster.workers.items() if worker.role is not WorkerRole.PREFILL]
        busy = [name for name in names if self.cluster.workers[name].jobs.num_open]
        for name in busy:
            role = self.cluster.workers[name].role
            await self.cluster.kill(name)
            self.cluster.start_worker(name, role)


async def ask(
    cluster: SimCluster, *, kill_after: int | None = None, grammar: str = GRAMMAR, **fields: object
) -> Receiver:
    body = {
        "prompt": list(range(1, 60)),
        "max_tokens": 60,
        "ignore_eos": True,
        "stop_token_ids": [END],
        "return_token_ids": True,
        "n": NUM_SAMPLES,
        **fields,
    }
    received = Receiver(cluster, kill_after)
    now_s = asyncio.get_running_loop().time()
    call = await cluster.gateway.validator.call(Endpoint.COMPLETIONS, body, Caller(), received_s=now_s)
    requests = tuple(replace(request, sampling=replace(request.sampling, grammar=grammar)) for request in call.requests)
    await cluster.gateway.run(replace(call, requests=requests), received)
    if received.killing:
        await received.killing
    return received


async def started(**roles: int) -> SimCluster:
    cluster = SimCluster(replace(config(), **roles), MODEL, seed=3)  # type: ignore[arg-type]
    await cluster.start()
    await asyncio.sleep(3.0)
    return cluster


@pytest.mark.fault("F-52")
@pytest.mark.parametrize(
    ("seed", "temperature"),
    [pytest.param(1, 0.0, marks=pytest.mark.long, id="greedy"), pytest.param(2, 1.0, id="seeded")],
)
def test_constrained_answer_is_the_same_on_any_workers_and_after_a_kill_at_any_token(
    seed: int, temperature: float
) -> None:
    async def main() -> None:
        hybrid = await started(prefill=0, decode=0, hybrid=1)
        right = (await ask(hybrid, seed=seed, temperature=temperature)).tokens
        await hybrid.aclose()
        for tokens in right.values():
            assert tokens[-1] == END
            assert re.fullmatch(PATTERN, bytes(tokens[:-1]))
        cluster = await started(prefill=1, decode=1, hybrid=0)
        for kill_after in (None, *range(1, len(right[0]))):
            received = await ask(cluster, seed=seed, temperature=temperature, kill_after=kill_after)
            assert received.tokens == right, kill_after
            assert bool(received.killing) is (kill_after is not None)
            await asyncio.sleep(3.0)
        await cluster.aclose()

    virtual_time.run(main())


@pytest.mark.parametrize(
    ("grammar", "reason", "code"),
    [
        ("start: nothing", Reason.INVALID_GRAMMAR, Code.INVALID_ARGUMENT),
        ('start: "ab"', Reason.NO_TOKEN_LEFT, Code.UNPROCESSABLE),
        (f"start: <[{MODEL.vocab_size}]>", Reason.INVALID_GRAMMAR, Code.INVALID_ARGUMENT),
    ],
)
def test_client_gets_the_reason_of_a_grammar_that_cannot_be_followed(grammar: str, reason: Reason, code: Code) -> None:
    async def main() -> None:
        cluster = await started(prefill=1, decode=1, hybrid=0)
        with pytest.raises(Refused) as refused:
            await ask(cluster, seed=1, temperature=1.0, grammar=grammar, stop_token_ids=[])
        assert (refused.value.failure.reason, refused.value.failure.code) == (reason, code)
        await asyncio.sleep(3.0)
        for worker in cluster.workers.values():
            worker.check_clean()
        await cluster.aclose()

    virtual_time.run(main())
