"""Options that the sources of `loadgen plan` have in common."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from loadgen.commands.option_types import Above, Seconds

F = TypeVar("F", bound=Callable[..., Any])

LENGTHS = "LENGTHS"
"""Metavar of `loadgen.plan.lengths`; its forms stand in the help of the group."""


def plan_options(function: F) -> F:
    """What every plan has."""
    return _all(
        function,
        click.option(
            "-o",
            "--out",
            type=click.Path(path_type=Path, dir_okay=False),
            required=True,
            help="The plan's file: .jsonl or .jsonl.gz.",
        ),
        click.option("--name", help="What reports call it.  [default: the source's name]"),
        click.option(
            "--seed",
            type=click.IntRange(0),
            default=0,
            show_default=True,
            help="Another seed makes another plan, with other tokens.",
        ),
        click.option(
            "--tokenizer",
            type=click.Path(path_type=Path),
            help="Draw tokens from its ordinary ones: tokenizer.json, or its directory.",
        ),
        click.option(
            "--vocab-size",
            type=click.IntRange(2),
            help="Or from so many.  [default: ids 1000 to 4095, which are text nearly everywhere]",
        ),
        click.option(
            "--first-token-id", type=click.IntRange(0), help="The lowest id with --vocab-size.  [default: 1000]"
        ),
        click.option("--slo", metavar="SLO", help="The promise to every request, such as ttft=500ms,tpot=50ms."),
        click.option(
            "--slo-class",
            "slo_classes",
            multiple=True,
            metavar="NAME:SHARE[:SLO]",
            help="Classes instead, such as interactive:0.7:ttft=500ms,tpot=50ms. Repeatable.",
        ),
        click.option("--tenants", metavar="NAME:SHARE,…", help="Who asks, such as a:3,b:1."),
        click.option("--priorities", metavar="N:SHARE,…", help="Lower goes first, such as 0:9,5:1."),
        click.option(
            "--cancel",
            type=click.FloatRange(0, 1),
            default=0.0,
            help="The part of clients who leave during their last answer.",
        ),
        click.option(
            "--stop-at-eos", is_flag=True, help="Let answers end themselves; else each has the planned length."
        ),
        click.option(
            "--cache-tokens",
            type=click.IntRange(1),
            help="Also say the best prefix hit of a cluster that holds so many tokens.",
        ),
    )


def arrival_options(count: str) -> Callable[[F], F]:
    """When requests or sessions arrive. `count`: which of them."""

    def decorate(function: F) -> F:
        return _all(
            function,
            click.option(
                "--rate",
                metavar="RATE",
                help=f"{count.capitalize()} a second: 5, ramp:1-10@60s, steps:2@60s,4@30s, onoff:10@5s,0@15s.",
            ),
            click.option(
                "--arrivals",
                "gaps",
                default="poisson",
                show_default=True,
                metavar="PROCESS",
                help="poisson, constant, gamma:cv=2, weibull:cv=2, weibull:shape=0.5; or file:PATH, one time in seconds a line.",
            ),
            click.option("--seconds", type=Seconds(), help="Arrivals for so long."),
            click.option(f"--{count}", "count", type=click.IntRange(1), help=f"So many {count}."),
        )

    return decorate


def length_options(function: F) -> F:
    return _all(
        function,
        click.option(
            "--input-tokens", metavar=LENGTHS, default="512", show_default=True, help="New tokens of each prompt."
        ),
        click.option(
            "--output-tokens", metavar=LENGTHS, default="128", show_default=True, help="Tokens of each answer."
        ),
    )


def prefix_options(count: int, help_of_count: str) -> Callable[[F], F]:
    """System prompts; `count` is the default number of them."""

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
                "--prefix-tokens", metavar=LENGTHS, default="1024", show_default=True, help="Tokens of each of them."
            ),
            click.option(
                "--zipf",
                type=click.FloatRange(0),
                default=1.0,
                show_default=True,
                help="The r-th is taken with a probability in proportion to 1/r^ZIPF; 0: all alike.",
            ),
        )

    return decorate


def cut_options(function: F) -> F:
    """Which part of a trace."""
    return _all(
        function,
        click.argument("file", type=click.Path(path_type=Path)),
        click.option("--start", type=Seconds(), help="Begin so far into the trace."),
        click.option("--seconds", type=Seconds(), help="Take so much of its time."),
        click.option("--limit", type=click.IntRange(1), help="Take so many requests at most."),
        click.option(
            "--time-scale",
            type=Above(0.0),
            default=1.0,
            show_default=True,
            help="Factor on all times; 0.5 doubles the rate.",
        ),
        click.option(
            "--max-tokens",
            type=click.IntRange(2),
            help="Leave out requests whose prompt and answer together are longer.",
        ),
    )


def _all(function: F, *options: Callable[[F], F]) -> F:
    """The options in the order of `--help`."""
    for option in reversed(options):
        function = option(function)
    return function
