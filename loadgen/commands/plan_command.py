"""`loadgen plan`: from arguments to a plan in a file, and in words what the user has made."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from loadgen import text_forms
from loadgen.commands.option_types import Above, Seconds
from loadgen.commands.plan_options import (
    LENGTHS,
    arrival_options,
    cut_options,
    length_options,
    plan_options,
    prefix_options,
)
from loadgen.loadgen_errors import BadPlan, NothingArrives
from loadgen.plan import draws
from loadgen.plan.arrivals import arrivals, parse_gaps, parse_rate, read_times, trace_times
from loadgen.plan.draws import Floats
from loadgen.plan.lengths import parse_lengths, parse_times
from loadgen.plan.mixes import Mixes, apply_mixes, parse_classes, parse_priorities, parse_tenants
from loadgen.plan.plan import Plan, PlannedRequest, Vocabulary
from loadgen.plan.plan_file import plan_hash, read_plan, write_plan
from loadgen.plan.plan_summary import summarize, summary_lines
from loadgen.plan.servegen import choose_windows, read_servegen, replay_servegen
from loadgen.plan.sharegpt import read_conversations, replay_conversations
from loadgen.plan.trace import Cut, read_azure, read_mooncake, replay_azure, replay_mooncake
from loadgen.plan.vocabulary import encoder_of, vocabulary_of, vocabulary_of_size
from loadgen.plan.workloads import DEFAULT_VOCABULARY, SessionShape, SharedPrompts, random_prompts, sessions
from loadgen.slo_target import SloTarget
from loadgen.user_files import sha256_of

FILES = ("file", "tokenizer")
NOT_OF_THE_PLAN = ("out", "name", "cache_tokens")


@click.group("plan")
def command() -> None:
    """Freeze a workload into a file: who asks for what, and when. The same arguments make the same file, on any machine.

    \b
    LENGTHS are   512
                  uniform:100-800
                  lognormal:mean=512,cv=0.8[,min=16][,max=4096]
                  exponential:mean=512[,min=…][,max=…]
                  file:lengths.csv:ContextTokens    drawn from a column of a CSV file, or a key of a JSONL file
    TIMES are the same, with 300ms, 5s or 2m for numbers.

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
    """Prompts that share nothing."""
    requests = random_prompts(
        _times(given),
        inputs=parse_lengths(given["input_tokens"]),
        outputs=parse_lengths(given["output_tokens"]),
        seed=given["seed"],
    )
    _finish("random", given, requests)


@command.command("shared-prefix")
@arrival_options("requests")
@prefix_options(10, "How many system prompts there are.")
@length_options
@plan_options
def shared_prefix_command(**given: Any) -> None:
    """Prompts that begin with one of a few system prompts."""
    requests = random_prompts(
        _times(given),
        inputs=parse_lengths(given["input_tokens"]),
        outputs=parse_lengths(given["output_tokens"]),
        seed=given["seed"],
        shared=_shared(given),
    )
    _finish("shared-prefix", given, requests)


@command.command("sessions")
@arrival_options("sessions")
@click.option("--turns", metavar=LENGTHS, default="uniform:2-8", show_default=True, help="Turns of each session.")
@click.option(
    "--think",
    metavar="TIMES",
    default="exponential:mean=5s",
    show_default=True,
    help="From an answer's end to the next turn.",
)
@click.option(
    "--first-input-tokens", metavar=LENGTHS, help="New tokens of the first turn.  [default: as --input-tokens]"
)
@length_options
@prefix_options(0, "How many system prompts there are.")
@click.option("--max-context", type=click.IntRange(2), help="End a session before prompt and answer are longer.")
@plan_options
def sessions_command(**given: Any) -> None:
    """Conversations of several turns.

    A turn's prompt is the earlier prompt, its answer, and new tokens; it goes out some time after that answer
    has ended.
    """
    turns = SessionShape(
        count=parse_lengths(given["turns"]),
        think=parse_times(given["think"]),
        first_inputs=parse_lengths(given["first_input_tokens"] or given["input_tokens"]),
        later_inputs=parse_lengths(given["input_tokens"]),
        outputs=parse_lengths(given["output_tokens"]),
        max_context=given["max_context"],
    )
    _finish("sessions", given, sessions(_times(given), turns, seed=given["seed"], shared=_shared(given)))


@command.command("mooncake")
@cut_options
@click.option(
    "--tick",
    default="3s",
    show_default=True,
    metavar="TIME",
    help="What the file's times are rounded to; undone at random. 0: kept.",
)
@click.option(
    "--shrink",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Divide all lengths, for a small model: a divisor of 512.",
)
@plan_options
def mooncake_command(**given: Any) -> None:
    """A trace of Mooncake's: its times, lengths and shared prefixes."""
    rows = read_mooncake(given["file"])
    replay = replay_mooncake(
        rows, _cut(given), seed=given["seed"], tick_s=text_forms.seconds(given["tick"]), shrink=given["shrink"]
    )
    _finish("mooncake", given, replay.requests, _left_out(replay.num_too_long, replay.num_empty))


@command.command("azure")
@cut_options
@plan_options
def azure_command(**given: Any) -> None:
    """A trace of Azure's: its times and lengths. It does not say what prompts share."""
    replay = replay_azure(read_azure(given["file"]), _cut(given))
    _finish("azure", given, replay.requests, _left_out(replay.num_too_long, replay.num_empty))


@command.command("servegen")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--workload", help="Which of the file's workloads, such as language/m-small.")
@click.option("--clients", metavar="N,N,…", help="Which clients.  [default: all]")
@click.option("--top", type=click.IntRange(1), help="Only the clients with the most requests, so many.")
@click.option("--start", type=Seconds(), help="Begin so far into the file's time.")
@click.option("--seconds", type=Seconds(), required=True, help="Take so much of it.")
@click.option("--rate-scale", type=Above(0.0), default=1.0, show_default=True, help="Factor on every client's rate.")
@click.option("--limit", type=click.IntRange(1), help="Take so many requests at most.")
@length_options
@plan_options
def servegen_command(**given: Any) -> None:
    """Bursty clients of ServeGen's, each a tenant: their rates and fitted gaps. The lengths are yours."""
    time = {"start_s": given["start"] or 0.0, "duration_s": given["seconds"]}
    clients = None if given["clients"] is None else [_whole(part, "--clients") for part in given["clients"].split(",")]
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
@click.option("--max-turns", type=click.IntRange(1), help="So many turns of each conversation at most; 1: no sessions.")
@click.option(
    "--think",
    metavar="TIMES",
    default="exponential:mean=5s",
    show_default=True,
    help="From an answer's end to the next turn.",
)
@click.option(
    "--history",
    type=click.Choice(["recorded", "answers"]),
    default="recorded",
    show_default=True,
    help="Later turns hold the file's answers, or the server's (takes --tokenizer).",
)
@click.option(
    "--output-tokens", metavar=LENGTHS, help="Tokens of each answer.  [default: as recorded, which takes --tokenizer]"
)
@click.option(
    "--max-context",
    type=click.IntRange(2),
    help="End a conversation before prompt and answer are longer; takes --tokenizer.",
)
@plan_options
def sharegpt_command(**given: Any) -> None:
    """Your own conversations, in ShareGPT's form. With --tokenizer prompts are token ids, else texts."""
    encode = None if given["tokenizer"] is None else encoder_of(given["tokenizer"])
    found = read_conversations(given["file"])
    requests = replay_conversations(
        _times(given),
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
        [f"left out    {found.num_unusable:,} conversations that do not begin with a user's text and an answer"]
        if found.num_unusable
        else []
    )
    _finish("sharegpt", given, requests, notes)


@command.command("show")
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--cache-tokens",
    type=click.IntRange(1),
    help="Also say the best prefix hit of a cluster that holds so many tokens.",
)
@click.option("--json", "is_json", is_flag=True, help="As one JSON object.")
def show_command(file: Path, cache_tokens: int | None, is_json: bool) -> None:
    """Check a plan, and say what it asks for."""
    plan = read_plan(file)
    _show(file, plan_hash(file), plan, cache_tokens, is_json=is_json)


# From arguments to parts of a plan.


def _times(given: Mapping[str, Any]) -> Floats:
    """Raises BadPlan."""
    rate, gaps, until_s, count = given["rate"], given["gaps"], given["seconds"], given["count"]
    if gaps.startswith("file:"):
        if rate is not None:
            raise BadPlan("--rate has no place beside --arrivals file:…, which says when requests arrive")
        times_s = trace_times(read_times(gaps.removeprefix("file:")).tolist(), until_s=until_s)[:count]
    else:
        if rate is None:
            raise BadPlan("how fast? Give --rate, such as 5 or ramp:1-10@60s")
        process, rates = parse_gaps(gaps), parse_rate(rate)
        is_endless = text_forms.split_kind(rate)[0] not in ("ramp", "steps")
        if is_endless and until_s is None and count is None:
            raise BadPlan("for how long? Give --seconds or a count")
        times_s = arrivals(draws.stream(given["seed"], "arrivals"), process, rates, until_s=until_s, count=count)
        if count is not None and until_s is None and len(times_s) < count:
            raise BadPlan(f"only {len(times_s)} of {count} arrive before the rate `{rate}` ends")
    if not len(times_s):
        raise NothingArrives("nothing arrives in that time: make it longer, or the rate higher")
    return times_s


def _shared(given: Mapping[str, Any]) -> SharedPrompts | None:
    if not given["prefixes"]:
        return None
    return SharedPrompts(count=given["prefixes"], lengths=parse_lengths(given["prefix_tokens"]), zipf=given["zipf"])


def _cut(given: Mapping[str, Any]) -> Cut:
    return Cut(
        start_s=given["start"] or 0.0,
        duration_s=given["seconds"],
        limit=given["limit"],
        time_scale=given["time_scale"],
        max_tokens=given["max_tokens"],
    )


def _mixes(given: Mapping[str, Any]) -> Mixes:
    """Raises BadPlan or BadSlo."""
    if given["slo"] is not None and given["slo_classes"]:
        raise BadPlan("--slo is for all requests; with --slo-class each class has its own")
    classes, slos = (
        parse_classes(given["slo_classes"])
        if given["slo_classes"]
        else (None, {"default": SloTarget.parse(given["slo"] or "")})
    )
    return Mixes(
        tenants=None if given["tenants"] is None else parse_tenants(given["tenants"]),
        priorities=None if given["priorities"] is None else parse_priorities(given["priorities"]),
        classes=classes,
        cancel=given["cancel"],
        slos=slos,
    )


def _vocabulary(given: Mapping[str, Any]) -> Vocabulary:
    """Raises BadPlan."""
    if given["tokenizer"] is not None:
        if given["vocab_size"] is not None or given["first_token_id"] is not None:
            raise BadPlan(
                "--vocab-size and --first-token-id are for a tokenizer that is not at hand: --tokenizer says both itself"
            )
        return vocabulary_of(given["tokenizer"])
    if given["vocab_size"] is not None:
        first_id = given["first_token_id"]
        return (
            vocabulary_of_size(given["vocab_size"])
            if first_id is None
            else vocabulary_of_size(given["vocab_size"], first_id)
        )
    if given["first_token_id"] is not None:
        raise BadPlan("--first-token-id goes with --vocab-size")
    return DEFAULT_VOCABULARY


def _whole(text: str, option: str) -> int:
    if not text.strip().isdigit():
        raise BadPlan(f"{option}: `{text}` is no whole number")
    return int(text)


def _left_out(num_too_long: int, num_empty: int) -> list[str]:
    notes = []
    if num_too_long:
        notes.append(f"left out    {num_too_long:,} requests that are longer than --max-tokens")
    if num_empty:
        notes.append(f"left out    {num_empty:,} requests without a prompt or an answer")
    return notes


# From parts to a file.


def _finish(
    source: str, given: Mapping[str, Any], requests: Sequence[PlannedRequest], notes: Sequence[str] = ()
) -> None:
    mixes = _mixes(given)
    plan = Plan(
        name=given["name"] or source,
        seed=given["seed"],
        vocabulary=_vocabulary(given),
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
    """For `made_by`: a file by its name and content, gzipped or not, since its path means nothing
    elsewhere."""
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
