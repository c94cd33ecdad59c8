"""The requests of a run, drawn from a seed: a fixed number of cases, which clients send again and again."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from tests.nemesis.history import Answer

COMPLETIONS, CHAT, GRPC = "completions", "chat", "grpc"
BOUNDARIES = [length + more for length in (16, 32, 64, 256) for more in (-1, 0, 1)]
"""Prompt lengths around the boundaries of blocks and chunks."""
ENDING = frozenset(("guided_regex", "guided_choice", "response_format", "tool_choice"))
"""Fields whose grammar has an end, where only the end token may be drawn."""
RULES = ENDING | {"allowed_token_ids", "bad_words"}
"""Fields that forbid tokens."""
WORDS = "open the file and read each line of text then close it before the next one begins".split()


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One request without its way of delivery.

    api: `completions` or `chat` over HTTP, or `grpc`.
    body: its JSON body, without `stream`.
    pattern: regular expression that the text of a choice matches, or a beginning of it if the choice ends at
        `max_tokens`; empty if there is none.
    """

    name: str
    api: str
    body: Mapping[str, Any]
    pattern: str = ""

    @property
    def has_rules(self) -> bool:
        """True if the response has rules that forbid tokens."""
        fields = {**self.body, **json.loads(self.body.get("fields_json", "{}"))}
        return not fields.keys().isdisjoint(RULES)


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
        fields, pattern = _rules(rng, api, vocab_size)
        if not fields.keys().isdisjoint(ENDING):
            body["ignore_eos"] = False
            body.pop("min_tokens", None)
        if "logprobs" in body:
            fields.pop("echo", None)  # the prompt would have logprobs, too, which no stream has
        body |= {"fields_json": json.dumps(fields)} if api == GRPC and fields else fields
        cases.append(Case(name=f"case {i}", api=api, body=body, pattern=pattern))
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


def _rules(rng: Random, api: str, vocab_size: int) -> tuple[dict[str, Any], str]:
    """Return options that workers must follow from any token on, and the pattern of the text."""
    fields: dict[str, Any] = {}
    if rng.random() < 0.15:
        fields["cache_salt"] = rng.choice(("one", "other"))
    if rng.random() < 0.1 and api == COMPLETIONS:
        fields["echo"] = True
    kind = rng.choice(("regex", "choice", "schema", "ids", "words", "tool")) if rng.random() < 0.3 else ""
    if kind == "regex":
        pattern = rng.choice((r"([a-h][0-9]){3,60}", r"(yes|no|maybe)(, (yes|no|maybe)){0,30}"))
        return fields | {"guided_regex": pattern}, "" if "echo" in fields else pattern
    if kind == "choice":
        words = rng.sample(WORDS, k=5)
        return fields | {"guided_choice": words}, "" if "echo" in fields else "|".join(words)
    if kind == "schema" and api != GRPC:
        schema = {"type": "object", "properties": {"a": {"enum": ["x", "yy"]}, "b": {"type": "boolean"}}}
        schema |= {"required": ["a", "b"], "additionalProperties": False}
        named = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        pattern = r'\{\s*"a"\s*:\s*"(x|yy)"\s*,\s*"b"\s*:\s*(true|false)\s*\}'
        return fields | {"response_format": named}, "" if "echo" in fields else pattern
    if kind == "ids":
        fields["allowed_token_ids"] = sorted(rng.sample(range(300, vocab_size), k=20))
    if kind == "words":
        fields["bad_words"] = rng.choices(WORDS, k=6)
    if kind == "tool" and api == CHAT:
        function = {"name": "read", "parameters": {"type": "object", "properties": {"line": {"type": "integer"}}}}
        fields |= {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    return fields, ""


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
