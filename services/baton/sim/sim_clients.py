"""Simulated clients, which call a gateway's service object directly and check every token of the answer."""

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
    """One planned request.

    start_s: virtual time at which it is sent.
    cancel_after_s: the client cancels after this time; None: never.
    """

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
    """The answer to one request, which is finished, failed or cancelled.

    tokens, finishes: token ids and finish reason by choice index.
    failure: reason code of a refusal or error.
    ended_s: virtual time of its end.
    """

    request: SimRequest
    tokens: dict[int, list[int]] = field(default_factory=dict)
    finishes: dict[int, FinishReason] = field(default_factory=dict)
    failure: str = ""
    was_cancelled: bool = False
    ended_s: float = 0.0

    def put(self, choice: ChoiceDelta) -> None:
        """Append new tokens of one choice. The gateway calls it as a `ChoiceSink`."""
        self.tokens.setdefault(choice.index, []).extend(choice.token_ids)
        if choice.finish is not None:
            if choice.index in self.finishes:
                raise AssertionError(f"request {self.request.number}: choice {choice.index} finished twice")
            self.finishes[choice.index] = choice.finish

    @property
    def outcome(self) -> str:
        """`finished`, `cancelled`, or the reason code of the failure."""
        if self.was_cancelled:
            return "cancelled"
        return self.failure or "finished"

    def check(self, vocab_size: int) -> None:
        """Raise AssertionError unless the tokens are a prefix of the expected answer, or all if finished."""
        for index in range(self.request.num_samples):
            expected = expected_answer(self.request, index, vocab_size)
            got = self.tokens.get(index, [])
            if got != expected[: len(got)] or (self.outcome == "finished" and len(got) != len(expected)):
                raise AssertionError(
                    f"request {self.request.number}, sample {index}, {self.outcome}: got {got}, expected {expected}"
                )


def expected_answer(request: SimRequest, sample_index: int, vocab_size: int) -> list[int]:
    """Compute the simulated model's answer to a prompt without any cluster."""
    content = contents(request.prompt)[-1]
    answer: list[int] = []
    for position in range(len(request.prompt), len(request.prompt) + request.max_tokens):
        answer.append(token_after(content, request.seed, sample_index, position, vocab_size))
        content = extend(content, answer[-1])
    return answer


async def run_client(request: SimRequest, gateway: GatewayService) -> SimAnswer:
    """Wait until the request's start time, send it, and return its answer, also if it failed."""
    loop = asyncio.get_running_loop()
    await asyncio.sleep(max(0.0, request.start_s - loop.time()))
    answer = SimAnswer(request=request)
    cancellation = None
    work = asyncio.ensure_future(gateway.run(_call(request, gateway, loop.time()), answer))
    if request.cancel_after_s is not None:
        cancellation = loop.call_later(request.cancel_after_s, work.cancel)
    try:
        await work
    except Refused as refused:
        answer.failure = refused.failure.reason.value
    except asyncio.CancelledError:
        answer.was_cancelled = True
    finally:
        if cancellation is not None:
            cancellation.cancel()
    answer.ended_s = loop.time()
    return answer


def _call(request: SimRequest, gateway: GatewayService, now_s: float) -> ClientCall:
    """Build the validated call. Its id comes from the request's number, so that a run can be repeated."""
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
