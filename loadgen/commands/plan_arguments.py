"""Turns the arguments of `loadgen plan` into the parts of a plan, and refuses arguments that contradict each
other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loadgen import text_forms
from loadgen.loadgen_errors import BadPlan, EmptyPlan
from loadgen.plan import draws
from loadgen.plan.arrivals import arrivals, parse_gaps, parse_rate, read_times, trace_times
from loadgen.plan.draws import Floats
from loadgen.plan.lengths import parse_lengths
from loadgen.plan.mixes import Mixes, parse_classes, parse_priorities, parse_tenants
from loadgen.plan.plan import Vocabulary
from loadgen.plan.sources.trace import Cut
from loadgen.plan.sources.workloads import DEFAULT_VOCABULARY, SharedPrompts
from loadgen.plan.vocabulary import vocabulary_of, vocabulary_of_size
from loadgen.slo_target import SloTarget


def times(given: Mapping[str, Any]) -> Floats:
    """Return the arrival times in seconds. Raises BadPlan."""
    rate, gaps, until_s, count = given["rate"], given["gaps"], given["seconds"], given["count"]
    if gaps.startswith("file:"):
        if rate is not None:
            raise BadPlan("--rate cannot be combined with --arrivals file:…, which contains the arrival times")
        times_s = trace_times(read_times(gaps.removeprefix("file:")).tolist(), until_s=until_s)[:count]
    else:
        if rate is None:
            raise BadPlan("the rate is missing; give --rate, such as 5 or ramp:1-10@60s")
        process, rates = parse_gaps(gaps), parse_rate(rate)
        is_endless = text_forms.split_kind(rate)[0] not in ("ramp", "steps")
        if is_endless and until_s is None and count is None:
            raise BadPlan("the plan has no end; give --seconds, --requests or --sessions")
        times_s = arrivals(draws.stream(given["seed"], "arrivals"), process, rates, until_s=until_s, count=count)
        if count is not None and until_s is None and len(times_s) < count:
            raise BadPlan(
                f"only {len(times_s)} of {count} arrive before the rate `{rate}` ends; give fewer, or a longer rate"
            )
    if not len(times_s):
        raise EmptyPlan("no request arrives in this time; give a longer time or a higher rate")
    return times_s


def shared_prompts(given: Mapping[str, Any]) -> SharedPrompts | None:
    """Return the system prompts that requests share; None if there are none. Raises BadPlan."""
    if not given["prefixes"]:
        return None
    return SharedPrompts(count=given["prefixes"], lengths=parse_lengths(given["prefix_tokens"]), zipf=given["zipf"])


def cut(given: Mapping[str, Any]) -> Cut:
    """Return the part of a trace to replay."""
    return Cut(
        start_s=given["start"] or 0.0,
        duration_s=given["seconds"],
        limit=given["limit"],
        time_scale=given["time_scale"],
        max_tokens=given["max_tokens"],
    )


def mixes(given: Mapping[str, Any]) -> Mixes:
    """Return the request attributes that are drawn at random. Raises BadPlan or BadSlo."""
    if given["slo"] is not None and given["slo_classes"]:
        raise BadPlan(
            "--slo applies to all requests and cannot be combined with --slo-class, which sets it for each class"
        )
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


def vocabulary(given: Mapping[str, Any]) -> Vocabulary:
    """Return the tokens that prompts are drawn from. Raises BadPlan."""
    if given["tokenizer"] is not None:
        if given["vocab_size"] is not None or given["first_token_id"] is not None:
            raise BadPlan("--vocab-size and --first-token-id cannot be combined with --tokenizer, which defines both")
        return vocabulary_of(given["tokenizer"])
    if given["vocab_size"] is not None:
        first_id = given["first_token_id"]
        return (
            vocabulary_of_size(given["vocab_size"])
            if first_id is None
            else vocabulary_of_size(given["vocab_size"], first_id)
        )
    if given["first_token_id"] is not None:
        raise BadPlan("--first-token-id needs --vocab-size")
    return DEFAULT_VOCABULARY
