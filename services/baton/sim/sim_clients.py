"""Simulated clients: they ask a gateway through its own service object, and check every token of the
answer."""

import asyncio
from dataclasses import dataclass, field

from baton.core.client_api import ChoiceDelta
from baton.core.errors import Refused
from baton.core.kv.block_hash import token_ids
from baton.core.request import FinishReason, GenerateRequest, Sampling
from baton.engine.kv_cache.checksum import extend, token_after
from baton.gateway.gateway_service import GatewayService
from baton.gateway.input.client_call import ClientCall, Endpoint, OutputOptions
from baton.sim.sim_memory import contents


@dataclass(frozen=True, slots=True, kw_only=True)
class SimRequest:
    """One request of a plan. `cancel_after_s`: the client leaves so long after it asked; None: it stays to
    the end."""

    number: int
    start_s: float
    prompt: tuple[int, ...]
    max_tokens: int
    num_samples: int = 1
    seed: int = 0
    timeout_s: float = 30.0
    cancel_after_s: float | None = None


@dataclass(slots=True, kw_only=True)
class SimAnswer:
    """What a client got: exactly one of finished, failed, cancelled."""

    request: SimRequest
    tokens: dict[int, list[int]] = field(default_factory=dict)
    finishes: dict[int, FinishReason] = field(default_factory=dict)
    failure: str = ""
    was_cancelled: bool = False
    ended_s: float = 0.0

    def put(self, choice: ChoiceDelta) -> None:
        """`ChoiceSink`: called by the gateway as the answer grows."""
        self.tokens.setdefault(choice.index, []).extend(choice.token_ids)
        if choice.finish is not None:
            if choice.index in self.finishes:
                raise AssertionError(f"request {self.request.number}: choice {choice.index} finished twice")
            self.finishes[choice.index] = choice.finish

    @property
    def outcome(self) -> str:
        if self.was_cancelled:
            return "cancelled"
        return self.failure or "finished"

    def check(self, vocab_size: int) -> None:
        """Invariant I1: what was delivered is a prefix of the only right answer, all of it if the request
        finished."""
        for index in range(self.request.num_samples):
            right = expected_answer(self.request, index, vocab_size)
            got = self.tokens.get(index, [])
            if got != right[: len(got)] or (self.outcome == "finished" and len(got) != len(right)):
                raise AssertionError(
                    f"request {self.request.number}, sample {index}, {self.outcome}: got {got}, right is {right}"
                )


def expected_answer(request: SimRequest, sample_index: int, vocab_size: int) -> list[int]:
    """What the simulated model says after the prompt, computed without any cluster."""
    content = contents(request.prompt)[-1]
    answer: list[int] = []
    for position in range(len(request.prompt), len(request.prompt) + request.max_tokens):
        answer.append(token_after(content, request.seed, sample_index, position, vocab_size))
        content = extend(content, answer[-1])
    return answer


async def run_client(request: SimRequest, gateway: GatewayService) -> SimAnswer:
    """Wait for the request's time, ask, and collect the answer. Returns whatever the end is."""
    loop = asyncio.get_running_loop()
    await asyncio.sleep(max(0.0, request.start_s - loop.time()))
    answer = SimAnswer(request=request)
    leaving = None
    work = asyncio.ensure_future(gateway.run(_call(request, gateway, loop.time()), answer))
    if request.cancel_after_s is not None:
        leaving = loop.call_later(request.cancel_after_s, work.cancel)
    try:
        await work
    except Refused as refused:
        answer.failure = refused.failure.reason.value
    except asyncio.CancelledError:
        answer.was_cancelled = True
    finally:
        if leaving is not None:
            leaving.cancel()
    answer.ended_s = loop.time()
    return answer


def _call(request: SimRequest, gateway: GatewayService, now_s: float) -> ClientCall:
    """As the validator would make it, ids drawn from the request's number so that a run can be repeated."""
    return ClientCall(
        endpoint=Endpoint.GRPC,
        model=gateway.rules.model,
        requests=(
            GenerateRequest(
                request_id=request.number.to_bytes(16, "big"),
                model=gateway.rules.model,
                token_ids=token_ids(request.prompt),
                num_prompt_tokens=len(request.prompt),
                sampling=Sampling(max_tokens=request.max_tokens, seed=request.seed, ignore_eos=True),
                sample_indices=tuple(range(request.num_samples)),
                received_s=now_s,
                deadline_s=now_s + request.timeout_s,
            ),
        ),
        n=request.num_samples,
        output_options=OutputOptions(stream=True, return_token_ids=True),
        received_s=now_s,
    )
