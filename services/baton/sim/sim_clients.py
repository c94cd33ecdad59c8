"""Simulated clients, which call a gateway's service object directly and check every token of the answer."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from baton.core.client_api import ChoiceDelta
from baton.core.errors import Refused
from baton.core.kv.block_hash import token_ids
from baton.core.request import NO_SLO, FinishReason, GenerateRequest, Sampling, Slo
from baton.engine.kv_cache.checksum import extend, token_after
from baton.gateway.gateway_service import CallOutcome, GatewayService
from baton.gateway.input.client_call import ClientCall, Endpoint, OutputOptions
from baton.sim.sim_memory import contents
from baton.sim.sim_rules import NO_RULES, SimRules

GATEWAY_LOST = "gateway_lost"
"""Outcome of a request whose gateway died."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimRequest:
    """One planned request.

    start_s: virtual time at which it is sent.
    cancel_after_s: the client cancels after this time; None: never.
    stop_token: token id whose text is the stop string; None: no stop string.
    cache_salt: salt of the block hashes.
    num_prompt_logprobs: number of most likely tokens to report for each prompt token; None: no logprobs.
    """

    number: int
    start_s: float
    prompt: tuple[int, ...]
    max_tokens: int
    num_samples: int = 1
    seed: int = 0
    timeout_s: float = 30.0
    cancel_after_s: float | None = None
    stop_token: int | None = None
    rules: SimRules = NO_RULES
    cache_salt: bytes = b""
    num_prompt_logprobs: int | None = None
    slo: Slo = NO_SLO


@dataclass(slots=True, kw_only=True)
class SimAnswer:
    """The answer to one request, which is finished, failed or cancelled.

    tokens, finishes: token ids and finish reason by choice index.
    prompt_logprobs: number of prompt tokens with logprobs, of each time that a choice got them.
    failure: reason code of a refusal or error; message: its text.
    gateway: name of the gateway that served it.
    ended_s: virtual time of its end.
    """

    request: SimRequest
    tokens: dict[int, list[int]] = field(default_factory=dict)
    finishes: dict[int, FinishReason] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[int]] = field(default_factory=dict)
    failure: str = ""
    message: str = ""
    was_cancelled: bool = False
    gateway: str = ""
    ended_s: float = 0.0

    async def begin(self) -> None:
        """Prepare nothing."""

    def put(self, choice: ChoiceDelta) -> None:
        """Append new tokens of one choice. The gateway calls it as a `ChoiceSink`."""
        if choice.index in self.finishes:
            raise AssertionError(f"request {self.request.number}: choice {choice.index} goes on after its finish")
        self.tokens.setdefault(choice.index, []).extend(choice.token_ids)
        if choice.prompt_logprobs:
            self.prompt_logprobs.setdefault(choice.index, []).append(len(choice.prompt_logprobs))
        if choice.finish is not None:
            self.finishes[choice.index] = choice.finish

    @property
    def outcome(self) -> str:
        """`finished`, `cancelled`, `gateway_lost`, or the reason code of the failure."""
        if self.was_cancelled:
            return "cancelled"
        return self.failure or "finished"

    def check(self, vocab_size: int) -> None:
        """Raise AssertionError unless the tokens are a prefix of the expected answer.

        A sample with a finish reason must be whole, and have the expected reason. A request that has finished
        has one for each sample. A sample with tokens has the logprobs of the prompt once, if they were
        requested.
        """
        num_scored = 0 if self.request.num_prompt_logprobs is None else len(self.request.prompt) - 1
        for index in range(self.request.num_samples):
            expected = expected_answer(self.request, index, vocab_size)
            got, finish = self.tokens.get(index, []), self.finishes.get(index)
            where = f"request {self.request.number}, sample {index}, {self.outcome}"
            if got != expected[: len(got)] or (finish is not None and len(got) != len(expected)):
                raise AssertionError(f"{where}: got {got}, expected {expected}")
            scored = self.prompt_logprobs.get(index, [])
            if got and scored != [num_scored][: min(1, num_scored)]:
                raise AssertionError(f"{where}: got the logprobs of {scored} prompt tokens, expected {num_scored}")
            is_stopped = expected[-1] == self.request.stop_token
            right = FinishReason.STOP if is_stopped else FinishReason.LENGTH
            if finish is not right and (finish is not None or self.outcome == "finished"):
                raise AssertionError(f"{where}: finish reason {finish}, expected {right}")


def expected_answer(request: SimRequest, sample_index: int, vocab_size: int, *, beyond_stop: bool = False) -> list[int]:
    """Compute the simulated model's answer to a prompt without any cluster.

    It ends with the stop token. `beyond_stop`: it ends only at `max_tokens`, as a worker may compute it.
    """
    content = contents(request.prompt)[-1]
    answer: list[int] = []
    for position in range(len(request.prompt), len(request.prompt) + request.max_tokens):
        choices = request.rules.choices(answer, vocab_size)
        answer.append(choices[token_after(content, request.seed, sample_index, position, len(choices))])
        if answer[-1] == request.stop_token and not beyond_stop:
            break
        content = extend(content, answer[-1])
    return answer


Spawn = Callable[[Coroutine[Any, Any, CallOutcome]], asyncio.Task[CallOutcome]]


async def run_client(
    request: SimRequest, gateway: GatewayService, *, spawn: Spawn = asyncio.ensure_future, name: str = ""
) -> SimAnswer:
    """Wait until the request's start time, send it, and return its answer, also if it failed.

    `spawn` starts the gateway's part of the call, inside the gateway's process. `name` is the gateway's.
    """
    loop = asyncio.get_running_loop()
    await asyncio.sleep(max(0.0, request.start_s - loop.time()))
    answer = SimAnswer(request=request, gateway=name)

    async def call() -> CallOutcome:
        return await gateway.run(_call(request, gateway, loop.time()), answer)

    work = spawn(call())
    cancellation = None

    def cancel() -> None:
        answer.was_cancelled = True
        work.cancel()

    if request.cancel_after_s is not None:
        cancellation = loop.call_later(request.cancel_after_s, cancel)
    try:
        await work
        answer.was_cancelled = False  # the cancel came too late
    except Refused as refused:
        answer.failure, answer.message = refused.failure.reason.value, refused.failure.message
        answer.was_cancelled = False
    except asyncio.CancelledError:
        if not answer.was_cancelled:
            answer.failure = GATEWAY_LOST
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
                sampling=Sampling(
                    max_tokens=request.max_tokens,
                    seed=request.seed,
                    ignore_eos=True,
                    grammar=request.rules.grammar,
                    allowed_token_ids=request.rules.allowed,
                    bad_words=request.rules.bad_words,
                    num_prompt_logprobs=request.num_prompt_logprobs,
                ),
                cache_salt=request.cache_salt,
                sample_indices=tuple(range(request.num_samples)),
                received_s=now_s,
                deadline_s=now_s + request.timeout_s,
                slo=request.slo,
            ),
        ),
        n=request.num_samples,
        output_options=OutputOptions(
            stream=True,
            return_token_ids=True,
            stop=() if request.stop_token is None else (chr(request.stop_token),),
        ),
        received_s=now_s,
    )
