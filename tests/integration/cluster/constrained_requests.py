"""Constrained requests to a test cluster, and the check of their answers against a reference."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from baton.core.request import Sampling
from tests.integration.cluster.clients import Request, Response
from tests.integration.test_constrained_exactness import ConstrainedAnswer, check

PATTERN = r"[a-z]{2,6}( [a-z]{2,6}){30,60}\."
NUM_SAMPLES = 4
GREEDY = Sampling(max_tokens=90, temperature=0.0, num_logprobs=2, presence_penalty=0.2, frequency_penalty=0.3)
SEEDED = replace(GREEDY, temperature=0.8, seed=7, top_p=0.95)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstrainedRequest(Request):
    """A request whose answers match `PATTERN`."""

    def body(self) -> dict[str, Any]:
        return {**Request.body(self), "fields_json": json.dumps({"structured_outputs": {"regex": PATTERN}})}


def constrained_requests(number: int) -> list[ConstrainedRequest]:
    """Return a greedy and a seeded request, with four samples each."""
    prompt = tuple(range(40 + number, 75 + number))
    return [
        ConstrainedRequest(prompt=prompt, sampling=sampling, num_samples=NUM_SAMPLES) for sampling in (GREEDY, SEEDED)
    ]


def check_constrained(model: torch.nn.Module, responses: Sequence[Response]) -> None:
    """Compare every token and logprob with one pass of transformers, and the masks with their definition."""
    for response in responses:
        assert response.is_complete, response
        sampling = response.request.sampling
        for index in range(NUM_SAMPLES):
            answer = ConstrainedAnswer(
                tuple(response.tokens[index]), tuple(response.logprobs[index]), response.finishes[index]
            )
            check(model, response.request.prompt, sampling, PATTERN.encode(), index, answer)
        samples = {tuple(tokens) for tokens in response.tokens.values()}
        assert len(samples) == (1 if sampling.is_greedy else NUM_SAMPLES)
