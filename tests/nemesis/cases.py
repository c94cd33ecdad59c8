"""The requests of a run, drawn from a seed: a fixed number of cases, which clients send again and again."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from tests.nemesis.history import Answer

COMPLETIONS, CHAT, GRPC = "completions", "chat", "grpc"
BOUNDARIES = [length + more for length in (16, 32, 64, 256) for more in (-1, 0, 1)]
"""Prompt lengths around the boundaries of blocks and chunks."""
WORDS = "open the file and read each line of text then close it before the next one begins".split()


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One request without its way of delivery.

    api: `completions` or `chat` over HTTP, or `grpc`.
    body: its JSON body, without `stream`.
    """

    name: str
    api: str
    body: Mapping[str, Any]


def draw_cases(seed: int, number: int, *, vocab_size: int, max_prompt: int, max_tokens: int) -> list[Case]:
    """Return `number` cases. Some share prefixes, and some prompts are repeated with other parameters."""
    rng = Random(seed)
    prompts: list[tuple[int, ...]] = []
    cases = []
    for i in range(number):
        api = rng.choices((COMPLETIONS, CHAT, GRPC), (5, 2, 3))[0]
        body = _sampling(rng, max_tokens)
        if api == CHAT:
            body |= {"messages": [{"role": "user", "content": " ".join(rng.choices(WORDS, k=rng.randrange(3, 40)))}]}
        else:
            prompts.append(_prompt(rng, prompts, max_prompt, vocab_size))
            several = api == COMPLETIONS and rng.random() < 0.25
            body["prompt"] = (
                [list(p) for p in rng.sample(prompts, min(3, len(prompts)))] if several else list(prompts[-1])
            )
        if rng.random() < 0.3:
            body |= {"logprobs": True, "top_logprobs": 2} if api == CHAT else {"logprobs": 2}
        cases.append(Case(name=f"case {i}", api=api, body=body))
    return cases


def with_stop_strings(seed: int, cases: Sequence[Case], answers: Mapping[str, Answer]) -> list[Case]:
    """Return further cases: some of `cases` with a stop string that occurs in their answers."""
    rng = Random(seed)
    stopped = []
    for case in cases:
        text = answers[case.name].choices[0].text
        if rng.random() < 0.3 and len(text) >= 8:
            begin = rng.randrange(len(text) // 4, len(text) - 3)
            stops = [text[begin : begin + rng.randrange(1, 4)], "never in any answer"]
            stopped.append(replace(case, name=f"{case.name} with stop", body={**case.body, "stop": stops}))
    return stopped


def _prompt(rng: Random, earlier: Sequence[tuple[int, ...]], max_prompt: int, vocab_size: int) -> tuple[int, ...]:
    length = rng.choice(BOUNDARIES) if rng.random() < 0.4 else rng.randrange(1, max_prompt + 1)
    length = min(length, max_prompt)
    if earlier and rng.random() < 0.15:
        return rng.choice(earlier)
    shared = rng.choice(earlier)[: rng.randrange(1, length + 1)] if earlier and rng.random() < 0.4 else ()
    return (*shared, *(rng.randrange(4, vocab_size) for _ in range(length - len(shared))))


def _sampling(rng: Random, max_tokens: int) -> dict[str, Any]:
    num_tokens = rng.randrange(2, max_tokens + 1)
    body: dict[str, Any] = {"max_tokens": num_tokens, "seed": rng.getrandbits(31), "ignore_eos": rng.random() < 0.7}
    body["temperature"] = 0.0 if rng.random() < 0.3 else rng.choice((0.5, 0.8, 1.0))
    if rng.random() < 0.25:
        body["n"] = rng.randrange(2, 5)
    if rng.random() < 0.25:
        body |= rng.choice(({"presence_penalty": 0.5, "frequency_penalty": 0.3}, {"repetition_penalty": 1.2}))
    if rng.random() < 0.2:
        body["min_tokens"] = rng.randrange(1, num_tokens + 1)
    if rng.random() < 0.2:
        body |= rng.choice(({"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.05}))
    return body
