"""Workloads of the `goodput` benchmark."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One workload.

    what: description for the table.
    prompt_tokens, answer_tokens: mean lengths, from which the SLO is measured.
    source: arguments of `loadgen plan`.
    """

    name: str
    what: str
    prompt_tokens: int
    answer_tokens: int
    source: tuple[str, ...]


def _random(prompt: str, answer: str) -> tuple[str, ...]:
    return ("random", "--input-tokens", prompt, "--output-tokens", answer)


WORKLOADS = (
    Workload(
        name="chat",
        what="prompts of 512 tokens (lognormal, cv 0.8), responses of 128 (cv 0.6)",
        prompt_tokens=512,
        answer_tokens=128,
        source=_random("lognormal:mean=512,cv=0.8,min=16,max=4096", "lognormal:mean=128,cv=0.6,min=8,max=512"),
    ),
    Workload(
        name="long-prompt",
        what="prompts of 3,000 tokens (cv 0.3), responses of 24 (cv 0.3)",
        prompt_tokens=3000,
        answer_tokens=24,
        source=_random("lognormal:mean=3000,cv=0.3,min=512,max=7000", "lognormal:mean=24,cv=0.3,min=4,max=64"),
    ),
    Workload(
        name="long-answer",
        what="prompts of 128 tokens (cv 0.5), responses of 256 (cv 0.4)",
        prompt_tokens=128,
        answer_tokens=256,
        source=_random("lognormal:mean=128,cv=0.5,min=16,max=1024", "lognormal:mean=256,cv=0.4,min=32,max=768"),
    ),
)
