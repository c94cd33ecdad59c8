"""Options that several sources of `loadgen plan` share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from loadgen.commands.option_types import Above, Seconds

F = TypeVar("F", bound=Callable[..., Any])

LENGTHS = "LENGTHS"
"""Metavar for `loadgen.plan.lengths`. The help of the command group explains its forms."""


def plan_options(function: F) -> F:
    """Add the options that every source has."""
    return _token_options(_client_options(function))


def _token_options(function: F) -> F:
    """Add the options for the file and its tokens."""
    return _all(
        function,
        click.option(
            "-o",
            "--out",
            type=click.Path(path_type=Path, dir_okay=False),
            required=True,
            help="Plan file to write: .jsonl or .jsonl.gz.",
        ),
        click.option("--name", help="Name of the plan in reports.  [default: the source's name]"),
        click.option(
            "--seed",
            type=click.IntRange(0),
            default=0,
            show_default=True,
            help="Seed of all random draws, tokens included.",
        ),
        click.option(
            "--tokenizer",
            type=click.Path(path_type=Path),
            help="Draw prompt tokens from this tokenizer's ordinary tokens: tokenizer.json or its directory.",
        ),
        click.option(
            "--vocab-size",
            type=click.IntRange(2),
            help="Draw prompt tokens from a vocabulary of this size.  [default: ids 1000 to 4095, ordinary text "
            "in nearly every tokenizer]",
        ),
        click.option(
            "--first-token-id",
            type=click.IntRange(0),
            help="Lowest token id to draw, with --vocab-size.  [default: 1000]",
        ),
    )


def _client_options(function: F) -> F:
    """Add the options for SLOs, clients and cancels."""
    return _all(
        function,
        click.option("--slo", metavar="SLO", help="SLO of every request, such as ttft=500ms,tpot=50ms."),
        click.option(
            "--slo-class",
            "slo_classes",
            multiple=True,
            metavar="NAME:SHARE[:SLO]",
            help="SLO class with its share of requests, such as interactive:0.7:ttft=500ms,tpot=50ms. Repeatable.",
        ),
        click.option(
            "--tenants", metavar="NAME:SHARE,…", help="Tenants with their shares of requests, such as a:3,b:1."
        ),
        click.option(
            "--priorities",
            metavar="N:SHARE,…",
            help="Priorities with their shares, such as 0:9,5:1; lower is more urgent.",
        ),
        click.option(
            "--cancel",
            type=click.FloatRange(0, 1),
            default=0.0,
            help="Share of clients that cancel during their last response.",
        ),
        click.option(
            "--stop-at-eos",
            is_flag=True,
            help="Let responses end at EOS; by default each has exactly the planned length.",
        ),
        click.option(
            "--cache-tokens",
            type=click.IntRange(1),
            help="Also print the best prefix hit ratio of a cluster whose KV cache holds this many tokens.",
        ),
    )


def arrival_options(count: str) -> Callable[[F], F]:
    """Add the options for arrival times. `count` names what arrives: requests or sessions."""

    def decorate(function: F) -> F:
        return _all(
            function,
            click.option(
                "--rate",
                metavar="RATE",
                help=f"{count.capitalize()} per second: 5, ramp:1-10@60s, steps:2@60s,4@30s, onoff:10@5s,0@15s.",
            ),
            click.option(
                "--arrivals",
                "gaps",
                default="poisson",
                show_default=True,
                metavar="PROCESS",
                help="poisson, constant, gamma:cv=2, weibull:cv=2, weibull:shape=0.5; or file:PATH with one time "
                "in seconds per line.",
            ),
            click.option("--seconds", type=Seconds(), help="Time over which they arrive."),
            click.option(f"--{count}", "count", type=click.IntRange(1), help=f"Number of {count}."),
        )

    return decorate


def length_options(function: F) -> F:
    """Add the options for prompt and response lengths."""
    return _all(
        function,
        click.option(
            "--input-tokens", metavar=LENGTHS, default="512", show_default=True, help="New tokens of each prompt."
        ),
        click.option(
            "--output-tokens", metavar=LENGTHS, default="128", show_default=True, help="Tokens of each response."
        ),
    )


def prefix_options(count: int, help_of_count: str) -> Callable[[F], F]:
    """Add the options for system prompts. `count` is the default number of them."""

    def decorate(function: F) -> F:
        return _all(
            function,
            click.option(
                "--prefixes",
                type=click.IntRange(0 if count == 0 else 1),
                default=count,
                show_default=True,
                help=help_of_count,
            ),
            click.option(
                "--prefix-tokens",
                metavar=LENGTHS,
                default="1024",
                show_default=True,
                help="Tokens of each system prompt.",
            ),
            click.option(
                "--zipf",
                type=click.FloatRange(0),
                default=1.0,
                show_default=True,
                help="Popularity: the r-th prompt is chosen with probability proportional to 1/r^ZIPF; 0 is uniform.",
            ),
        )

    return decorate


def cut_options(function: F) -> F:
    """Add the options that select a part of a trace."""
    return _all(
        function,
        click.argument("file", type=click.Path(path_type=Path)),
        click.option("--start", type=Seconds(), help="Start at this time of the trace."),
        click.option("--seconds", type=Seconds(), help="Length of the part to take."),
        click.option("--limit", type=click.IntRange(1), help="Take at most this many requests."),
        click.option(
            "--time-scale",
            type=Above(0.0),
            default=1.0,
            show_default=True,
            help="Multiply all times by this factor; 0.5 doubles the rate.",
        ),
        click.option(
            "--max-tokens",
            type=click.IntRange(2),
            help="Leave out requests whose prompt and response together have more tokens.",
        ),
    )


def _all(function: F, *options: Callable[[F], F]) -> F:
    """Apply the options so that `--help` lists them in the given order."""
    for option in reversed(options):
        function = option(function)
    return function
