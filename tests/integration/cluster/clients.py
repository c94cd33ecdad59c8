"""gRPC clients of a test cluster. They record their requests and answers for later checks."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from baton.core.client_api import ChoiceDelta, Timeline, TotalUsage
from baton.core.errors import Refused, StreamBroken
from baton.core.request import FinishReason, Sampling, TokenLogprobs
from baton.rpc.channel import channel_options, open_channel
from baton.rpc.inference_rpc import InferenceClient
from tests.cluster import ProcessCluster
from tests.exactness import Answer

DEADLINE_S = 110.0
"""Time limit of a request. A busy machine must not end one. A lost one fails before its test is stopped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request. All sampling parameters except n come from `sampling`."""

    prompt: tuple[int, ...]
    sampling: Sampling
    num_samples: int = 1
    session: str | None = None

    def body(self) -> dict[str, Any]:
        s = self.sampling
        return {
            "session": self.session,
            "prompt": list(self.prompt),
            "max_tokens": s.max_tokens,
            "temperature": s.temperature,
            "top_k": s.top_k,
            "top_p": s.top_p,
            "min_p": s.min_p,
            "seed": s.seed,
            "n": self.num_samples,
            "logprobs": s.num_logprobs,
            "repetition_penalty": s.repetition_penalty,
            "presence_penalty": s.presence_penalty,
            "frequency_penalty": s.frequency_penalty,
            "ignore_eos": s.ignore_eos,
            "min_tokens": s.min_tokens,
            "stop_token_ids": list(s.stop_token_ids),
            "timeline": True,
        }


@dataclass(slots=True, kw_only=True)
class Response:
    """The answer to a request.

    tokens, logprobs, finishes: by choice index.
    failure: reason code of an error, empty if there was none.
    """

    request: Request
    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    finishes: dict[int, FinishReason] = field(default_factory=dict)
    usage: TotalUsage | None = None
    timeline: Timeline | None = None
    failure: str = ""
    longest_pause_s: float = 0.0

    def take(self, choice: ChoiceDelta) -> None:
        self.tokens.setdefault(choice.index, []).extend(choice.token_ids)
        self.logprobs.setdefault(choice.index, []).extend(choice.logprobs)
        if choice.finish is not None:
            assert choice.index not in self.finishes, "exactly one end"
            self.finishes[choice.index] = choice.finish

    @property
    def is_complete(self) -> bool:
        """True if all samples finished and the usage arrived."""
        return self.usage is not None and len(self.finishes) == self.request.num_samples

    def token_chains(self) -> list[tuple[int, ...]]:
        """Return the token chains, as `History` requires."""
        return [(*self.request.prompt, *tokens) for tokens in self.tokens.values()] or [self.request.prompt]

    def answers(self) -> list[Answer]:
        """Return one answer per sample, for `ExactnessChecker`."""
        return [
            Answer(
                prompt=self.request.prompt,
                sampling=self.request.sampling,
                tokens=tuple(tokens),
                logprobs=tuple(self.logprobs[index]),
                sample_index=index,
            )
            for index, tokens in sorted(self.tokens.items())
        ]


class Client:
    """A client of a cluster's gateway, used as `async with`.

    It appends its requests to the cluster's history. Its keepalive is long, so that a busy machine breaks no
    stream.
    """

    def __init__(self, cluster: ProcessCluster) -> None:
        self._history = cluster.history
        self._channel = open_channel(cluster.grpc_address, channel_options(10.0))
        self._api = InferenceClient(self._channel, cluster.grpc_address)

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._channel.close()

    async def send(
        self, request: Request, *, cancel_after: int | None = None, deadline_s: float = DEADLINE_S
    ) -> Response:
        """Send a request and collect the answer. The client cancels after `cancel_after` tokens."""
        response = Response(request=request)
        self._history.append(response)
        loop = asyncio.get_running_loop()
        last_s = loop.time()
        try:
            generation = await self._api.generate(request.body(), timeout_s=deadline_s)
            try:
                while True:
                    chunk = await generation.receive()
                    now_s = loop.time()
                    response.longest_pause_s, last_s = max(response.longest_pause_s, now_s - last_s), now_s
                    for choice in chunk.choices:
                        response.take(choice)
                    if chunk.usage is not None:
                        response.usage, response.timeline = chunk.usage, chunk.timeline
                        break
                    if cancel_after is not None and sum(map(len, response.tokens.values())) >= cancel_after:
                        break
            finally:
                await generation.aclose()
        except Refused as refused:
            response.failure = refused.failure.reason.value
        except StreamBroken as broken:
            response.failure = f"broken: {broken}"
        return response


def random_requests(
    rng: Random, number: int, *, max_prompt: int, vocab_size: int, max_tokens: int = 16, num_samples: int = 1
) -> list[Request]:
    """Return random requests: lengths around block and chunk boundaries, shared prefixes, repeated prompts,
    and greedy or any other kind of sampling."""
    boundaries = [n + d for n in (16, 32, 64, 256, 512, 1024, 2048) for d in (-1, 0, 1)] + [1, 2]
    prompts: list[tuple[int, ...]] = []
    for _ in range(number):
        length = (
            rng.choice([b for b in boundaries if b <= max_prompt])
            if rng.random() < 0.5
            else rng.randrange(1, max_prompt + 1)
        )
        kind = rng.random()
        if prompts and kind < 0.15:
            prompts.append(rng.choice(prompts))
            continue
        prefix = rng.choice(prompts)[: rng.randrange(1, length + 1)] if prompts and kind < 0.45 else ()
        prompts.append(
            prefix[:length] + tuple(rng.randrange(4, vocab_size) for _ in range(length - len(prefix[:length])))
        )
    return [Request(prompt=prompt, sampling=_sampling(rng, max_tokens), num_samples=num_samples) for prompt in prompts]


def _sampling(rng: Random, max_tokens: int) -> Sampling:
    shared: dict[str, Any] = {
        "max_tokens": rng.randrange(1, max_tokens + 1),
        "num_logprobs": 5,
        "ignore_eos": rng.random() < 0.5,
    }
    if rng.random() < 0.5:
        return Sampling(temperature=0.0, **shared)
    more = rng.choice(
        [
            {},
            {"top_k": 20},
            {"top_p": 0.9},
            {"min_p": 0.05},
            {"presence_penalty": 0.5, "frequency_penalty": 0.3},
            {"repetition_penalty": 1.2},
        ]
    )
    return Sampling(temperature=rng.choice([0.5, 0.8, 1.0]), seed=rng.getrandbits(31), **shared, **more)


async def send_all(cluster: ProcessCluster, requests: Sequence[Request], *, in_flight: int = 32) -> list[Response]:
    """Send all requests, at most `in_flight` at a time, and return their answers in order."""
    slots = asyncio.Semaphore(in_flight)
    async with Client(cluster) as client:

        async def one(request: Request) -> Response:
            async with slots:
                return await client.send(request)

        return list(await asyncio.gather(*(one(request) for request in requests)))
