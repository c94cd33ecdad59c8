"""Implements `loadgen plan`: writes a plan file from the arguments and prints a summary."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from loadgen import text_forms
from loadgen.commands import plan_arguments
from loadgen.commands.option_types import Above, Seconds
from loadgen.commands.plan_options import (
    LENGTHS,
    arrival_options,
    cut_options,
    length_options,
    plan_options,
    prefix_options,
)
from loadgen.loadgen_errors import BadPlan
from loadgen.plan.lengths import parse_lengths, parse_times
from loadgen.plan.mixes import apply_mixes
from loadgen.plan.plan import Plan, PlannedRequest
from loadgen.plan.plan_file import plan_hash, read_plan, write_plan
from loadgen.plan.plan_summary import summarize, summary_lines
from loadgen.plan.sources.servegen import choose_windows, read_servegen, replay_servegen
from loadgen.plan.sources.sharegpt import read_conversations, replay_conversations
from loadgen.plan.sources.trace import read_azure, read_mooncake, replay_azure, replay_mooncake
from loadgen.plan.sources.workloads import SessionShape, random_prompts, sessions
from loadgen.plan.vocabulary import encoder_of
from loadgen.user_files import sha256_of

FILES = ("file", "tokenizer")
NOT_OF_THE_PLAN = ("out", "name", "cache_tokens")


@click.group("plan")
def command() -> None:
    """Generate a workload and write it to a file: which requests are sent, and when.

    The same arguments make the same file on any machine.

    \b
    LENGTHS are   512
                  uniform:100-800
                  lognormal:mean=512,cv=0.8[,min=16][,max=4096]
                  exponential:mean=512[,min=…][,max=…]
                  file:lengths.csv:ContextTokens    drawn from a column of a CSV or a key of a JSONL file
    TIMES are the same, with durations (300ms, 5s, 2m) instead of numbers.

    \b
    loadgen plan random --rate 2 --seconds 60 --input-tokens lognormal:mean=512,cv=0.8 -o chat.jsonl.gz
    loadgen plan mooncake conversation_trace.jsonl --seconds 10m -o conversation.jsonl.gz
    loadgen run chat.jsonl.gz --url http://127.0.0.1:8000
    """


@command.command("random")
@arrival_options("requests")
@length_options
@plan_options
def random_command(**given: Any) -> None:
    """Prompts without shared prefixes."""
    requests = random_prompts(
        plan_arguments.times(given),
        inputs=parse_lengths(given["input_tokens"]),
        outputs=parse_lengths(given["output_tokens"]),
        seed=given["seed"],
    )
    _finish("random", given, requests)


@command.command("shared-prefix")
@arrival_options("requests")
@prefix_options(10, "Number of system prompts.")
@length_options
@plan_options
def shared_prefix_command(**given: Any) -> None:
    """Prompts that start with one of a few system prompts."""
    requests = random_prompts(
        plan_arguments.times(given),
        inputs=parse_lengths(given["input_tokens"]),
        outputs=parse_lengths(given["output_tokens"]),
        seed=given["seed"],
        shared=plan_arguments.shared_prompts(given),
    )
    _finish("shared-prefix", given, requests)


@command.command("sessions")
@arrival_options("sessions")
@click.option(
    "--turns", metavar=LENGTHS, default="uniform:2-8", show_default=True, help="Number of turns of each session."
)
@click.option(
    "--think",
    metavar="TIMES",
    default="exponential:mean=5s",
    show_default=True,
    help="Think time from the end of a response to the next turn.",
)
@click.option(
    "--first-input-tokens", metavar=LENGTHS, help="New tokens of the first turn.  [default: same as --input-tokens]"
)
@length_options
@prefix_options(0, "Number of system prompts.")
@click.option(
    "--max-context", type=click.IntRange(2), help="End a session before prompt and response exceed this many tokens."
)
@plan_options
def sessions_command(**given: Any) -> None:
    """Conversations of several turns.

    A turn's prompt is the previous prompt, its response, and new tokens. It is sent a think time after that
    response has ended.
    """
    turns = SessionShape(
        count=parse_lengths(given["turns"]),
        think=parse_times(given["think"]),
        first_inputs=parse_lengths(given["first_input_tokens"] or given["input_tokens"]),
        later_inputs=parse_lengths(given["input_tokens"]),
        outputs=parse_lengths(given["output_tokens"]),
        max_context=given["max_context"],
    )
    _finish(
        "sessions",
        given,
        sessions(plan_arguments.times(given), turns, seed=given["seed"], shared=plan_arguments.shared_prompts(given)),
    )


@command.command("mooncake")
@cut_options
@click.option(
    "--tick",
    default="3s",
    show_default=True,
    metavar="TIME",
    help="Rounding of the file's times, undone by random offsets; 0 keeps the times.",
)
@click.option(
    "--shrink",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Divide all lengths by this divisor of 512, for a small model.",
)
@plan_options
def mooncake_command(**given: Any) -> None:
    """Replay a Mooncake trace: its times, lengths and shared prefixes."""
    rows = read_mooncake(given["file"])
    replay = replay_mooncake(
        rows,
        plan_arguments.cut(given),
        seed=given["seed"],
        tick_s=text_forms.seconds(given["tick"]),
        shrink=given["shrink"],
    )
    _finish("mooncake", given, replay.requests, _left_out(replay.num_too_long, replay.num_empty))


@command.command("azure")
@cut_options
@plan_options
def azure_command(**given: Any) -> None:
    """Replay an Azure trace: its times and lengths. The trace has no information on shared prefixes."""
    replay = replay_azure(read_azure(given["file"]), plan_arguments.cut(given))
    _finish("azure", given, replay.requests, _left_out(replay.num_too_long, replay.num_empty))


@command.command("servegen")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--workload", help="Workload in the file, such as language/m-small.")
@click.option("--clients", metavar="N,N,…", help="Clients to use.  [default: all]")
@click.option("--top", type=click.IntRange(1), help="Use only the N clients with the most requests.")
@click.option("--start", type=Seconds(), help="Start at this time of the file.")
@click.option("--seconds", type=Seconds(), required=True, help="Length of the part to take.")
@click.option(
    "--rate-scale", type=Above(0.0), default=1.0, show_default=True, help="Multiply every client's rate by this factor."
)
@click.option("--limit", type=click.IntRange(1), help="Take at most this many requests.")
@length_options
@plan_options
def servegen_command(**given: Any) -> None:
    """Bursty ServeGen clients, one tenant each, with their rates and fitted gaps. Lengths come from the
    options."""
    time = {"start_s": given["start"] or 0.0, "duration_s": given["seconds"]}
    clients = (
        None if given["clients"] is None else [_integer(part, "--clients") for part in given["clients"].split(",")]
    )
    windows = choose_windows(
        read_servegen(given["file"]), workload=given["workload"], clients=clients, top=given["top"], **time
    )
    requests = replay_servegen(
        windows,
        inputs=parse_lengths(given["input_tokens"]),
        outputs=parse_lengths(given["output_tokens"]),
        seed=given["seed"],
        rate_scale=given["rate_scale"],
        limit=given["limit"],
        **time,
    )
    _finish("servegen", given, requests)


@command.command("sharegpt")
@click.argument("file", type=click.Path(path_type=Path))
@arrival_options("sessions")
@click.option(
    "--max-turns",
    type=click.IntRange(1),
    help="Use at most this many turns of each conversation; 1 means single requests.",
)
@click.option(
    "--think",
    metavar="TIMES",
    default="exponential:mean=5s",
    show_default=True,
    help="Think time from the end of a response to the next turn.",
)
@click.option(
    "--history",
    type=click.Choice(["recorded", "answers"]),
    default="recorded",
    show_default=True,
    help="Later turns contain the file's responses, or the server's own (needs --tokenizer).",
)
@click.option(
    "--output-tokens", metavar=LENGTHS, help="Tokens of each response.  [default: as recorded, which needs --tokenizer]"
)
@click.option(
    "--max-context",
    type=click.IntRange(2),
    help="End a conversation before prompt and response exceed this many tokens; needs --tokenizer.",
)
@plan_options
def sharegpt_command(**given: Any) -> None:
    """Replay your own conversations in ShareGPT format. Prompts are token ids with --tokenizer, texts
    without."""
    encode = None if given["tokenizer"] is None else encoder_of(given["tokenizer"])
    found = read_conversations(given["file"])
    requests = replay_conversations(
        plan_arguments.times(given),
        found.usable,
        seed=given["seed"],
        think=parse_times(given["think"]),
        encode=encode,
        outputs=None if given["output_tokens"] is None else parse_lengths(given["output_tokens"]),
        recorded_answers=given["history"] == "recorded",
        max_turns=given["max_turns"],
        max_context=given["max_context"],
    )
    notes = (
        [f"left out    {found.num_unusable:,} conversations that do not start with a user's text and a response"]
        if found.num_unusable
        else []
    )
    _finish("sharegpt", given, requests, notes)


@command.command("show")
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--cache-tokens",
    type=click.IntRange(1),
    help="Also print the best prefix hit ratio of a cluster whose KV cache holds this many tokens.",
)
@click.option("--json", "is_json", is_flag=True, help="Print one JSON object.")
def show_command(file: Path, cache_tokens: int | None, is_json: bool) -> None:
    """Check a plan and print its summary."""
    plan = read_plan(file)
    _show(file, plan_hash(file), plan, cache_tokens, is_json=is_json)


def _integer(text: str, option: str) -> int:
    if not text.strip().isdigit():
        raise BadPlan(f"{option}: `{text}` is not an integer")
    return int(text)


def _left_out(num_too_long: int, num_empty: int) -> list[str]:
    notes = []
    if num_too_long:
        notes.append(f"left out    {num_too_long:,} requests longer than --max-tokens")
    if num_empty:
        notes.append(f"left out    {num_empty:,} requests without a prompt or a response")
    return notes


def _finish(
    source: str, given: Mapping[str, Any], requests: Sequence[PlannedRequest], notes: Sequence[str] = ()
) -> None:
    mixes = plan_arguments.mixes(given)
    plan = Plan(
        name=given["name"] or source,
        seed=given["seed"],
        vocabulary=plan_arguments.vocabulary(given),
        requests=tuple(apply_mixes(requests, mixes, given["seed"])),
        slos=mixes.slos,
        ignore_eos=not given["stop_at_eos"],
        made_by={"source": source}
        | {name: _recorded(name, value) for name, value in given.items() if _is_recorded(name, value)},
    )
    _show(given["out"], write_plan(plan, given["out"]), plan, given["cache_tokens"], notes)


def _is_recorded(name: str, value: Any) -> bool:
    return name not in NOT_OF_THE_PLAN and value is not None and value is not False and value != ()


def _recorded(name: str, value: Any) -> Any:
    """Return a value in the form for `made_by`. A file is recorded by name and content hash, not by path."""
    if name not in FILES:
        return list(value) if isinstance(value, tuple) else value
    path = value / "tokenizer.json" if value.is_dir() else value
    return {"file": path.name.removesuffix(".gz"), "sha256": sha256_of(path)}


def _show(
    path: Path, sha256: str, plan: Plan, cache_tokens: int | None, notes: Sequence[str] = (), *, is_json: bool = False
) -> None:
    summary = summarize(plan, lru_tokens=cache_tokens)
    if is_json:
        click.echo(json.dumps({"sha256": sha256} | summary.to_json(), indent=2))
        return
    click.echo(f"plan        {path}    {plan.name}, seed {plan.seed}")
    click.echo(f"sha256      {sha256}")
    for line in (*summary_lines(plan, summary), *notes):
        click.echo(line)
