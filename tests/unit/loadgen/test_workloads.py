"""Synthetic workloads: sharing, sessions, and independent random streams."""

from collections import Counter
from typing import Any

import pytest

from loadgen.loadgen_errors import BadPlan
from loadgen.plan.arrivals import poisson
from loadgen.plan.draws import Floats, stream
from loadgen.plan.lengths import Distribution, Fixed, parse_lengths, parse_times
from loadgen.plan.mixes import Mix, Mixes, apply_mixes, parse_classes, parse_priorities, parse_tenants
from loadgen.plan.plan import AnswerOf, Generated, PlannedRequest
from loadgen.plan.plan_check import check_plan
from loadgen.plan.plan_file import hash_of
from loadgen.plan.prompt_tokens import tokens_of
from loadgen.plan.sources.workloads import SessionShape, SharedPrompts, random_prompts, sessions, simple_plan
from loadgen.slo_target import BadSlo, SloTarget
from tests.unit.loadgen.plans import plan, request


def times(count: int, seed: int = 0) -> Floats:
    return poisson(stream(seed, "arrivals"), rate_rps=1, count=count)


def turns(**options: Any) -> SessionShape:
    defaults: dict[str, Any] = {
        "count": parse_lengths("uniform:1-6"),
        "think": parse_times("exponential:mean=5s"),
        "first_inputs": parse_lengths("lognormal:mean=200,cv=0.5"),
        "later_inputs": parse_lengths("uniform:10-50"),
        "outputs": parse_lengths("uniform:5-20"),
    }
    return SessionShape(**defaults | options)


def random_requests(
    count: int, *, inputs: str = "uniform:10-500", outputs: str = "uniform:1-50", seed: int = 0, **options: Any
) -> list[PlannedRequest]:
    return random_prompts(
        times(count, seed), inputs=parse_lengths(inputs), outputs=parse_lengths(outputs), seed=seed, **options
    )


def part(planned: PlannedRequest, position: int) -> Generated:
    segment = planned.segments[position]
    assert isinstance(segment, Generated)
    return segment


def test_random_prompts_share_nothing() -> None:
    requests = random_requests(500)
    check_plan(plan(*requests))
    assert [r.at_s for r in requests] == times(500).tolist()
    assert len({part(r, 0).segment_id for r in requests}) == 500
    assert all(len(r.segments) == 1 for r in requests)


def test_random_streams_are_independent() -> None:
    a, b = random_requests(200), random_requests(200, inputs="512")
    assert [(r.at_s, r.output_tokens) for r in a] == [(r.at_s, r.output_tokens) for r in b]
    c = random_requests(200, shared=SharedPrompts(count=5, lengths=Fixed(100)))
    assert [(r.at_s, r.output_tokens, part(r, -1).num_tokens) for r in a] == [
        (r.at_s, r.output_tokens, part(r, -1).num_tokens) for r in c
    ]
    d = random_requests(200, shared=SharedPrompts(count=5, lengths=parse_lengths("uniform:50-90")))
    assert [part(r, 0).segment_id for r in c] == [part(r, 0).segment_id for r in d]


def test_more_requests_start_like_fewer() -> None:
    assert random_requests(50) == random_requests(400)[:50]


def test_system_prompts_are_shared_by_popularity() -> None:
    requests = random_requests(20_000, shared=SharedPrompts(count=4, lengths=parse_lengths("uniform:50-90"), zipf=1.0))
    groups = Counter(part(r, 0).segment_id for r in requests)
    by_rank = [count for _, count in sorted(groups.items())]
    total = 1 + 1 / 2 + 1 / 3 + 1 / 4
    assert by_rank == pytest.approx([20_000 / total / rank for rank in (1, 2, 3, 4)], rel=0.05)
    assert {part(r, 1).segment_id for r in requests} == set(range(4, 20_004))


def test_later_turn_has_earlier_prompt_response_and_new_tokens() -> None:
    requests = sessions(times(50), turns(), seed=0, shared=SharedPrompts(count=3, lengths=Fixed(64)))
    check_plan(plan(*requests))
    for later in requests:
        if later.after is None:
            assert (later.turn, later.think_s, len(later.segments)) == (0, 0.0, 2)
            continue
        earlier = requests[later.after]
        assert (later.session, later.turn, later.at_s) == (earlier.session, earlier.turn + 1, None)
        assert later.segments[:-1] == (*earlier.segments, AnswerOf(index=earlier.index))
    assert Counter(r.session for r in requests).keys() == {f"s{i}" for i in range(50)}
    assert set(Counter(r.session for r in requests).values()) == {1, 2, 3, 4, 5, 6}


def test_sessions_are_in_order_of_time() -> None:
    requests = sessions(times(50), turns(), seed=0)
    assert [r.at_s for r in requests if r.at_s is not None] == times(50).tolist()
    due: list[float] = []
    for r in requests:
        due.append(r.at_s if r.at_s is not None else due[r.after] + r.think_s)  # type: ignore[index]
    assert due == sorted(due)
    thinks = [r.think_s for r in requests if r.after is not None]
    assert sum(thinks) / len(thinks) == pytest.approx(5, rel=0.3)


def test_turn_starts_with_the_tokens_of_the_previous_turn() -> None:
    planned = plan(*sessions(times(5), turns(count=Fixed(3)), seed=0))
    last = next(r for r in planned.requests if r.turn == 2)
    middle = planned.requests[last.after or 0]
    first = planned.requests[middle.after or 0]
    answers = {first.index: (5,) * first.output_tokens, middle.index: (6,) * middle.output_tokens}
    prompt = tokens_of(planned, last, answers)
    assert len(prompt) == planned.num_prompt_tokens(last)
    assert prompt[: planned.num_prompt_tokens(middle)] == tokens_of(planned, middle, answers)


def test_session_ends_before_max_context() -> None:
    uncut = sessions(times(40), turns(first_inputs=Fixed(200)), seed=0)
    cut = sessions(times(40), turns(first_inputs=Fixed(200), max_context=300), seed=0)
    planned = plan(*cut)
    assert max((planned.num_prompt_tokens(r) or 0) + r.output_tokens for r in cut) <= 300
    assert len(cut) < len(uncut)
    cut_turns = {(r.session, r.turn, r.think_s, r.output_tokens) for r in cut}
    assert cut_turns < {(r.session, r.turn, r.think_s, r.output_tokens) for r in uncut}
    with pytest.raises(BadPlan, match=r"session \d+ has \d+ tokens in its first turn, above --max-context \(50\)"):
        sessions(times(40), turns(first_inputs=Fixed(40), max_context=50), seed=0)


def test_simple_plan_has_the_given_rate_and_lengths() -> None:
    planned = simple_plan(rate_rps=5, seconds=20, input_tokens=100, output_tokens=7, seed=1, slo=SloTarget(ttft_s=1))
    check_plan(planned)
    assert {(planned.num_prompt_tokens(r), r.output_tokens) for r in planned.requests} == {(100, 7)}
    assert 60 < len(planned.requests) < 140
    assert hash_of(planned) == hash_of(
        simple_plan(rate_rps=5, seconds=20, input_tokens=100, output_tokens=7, seed=1, slo=SloTarget(ttft_s=1))
    )
    with pytest.raises(BadPlan, match="no request arrives in 1 s"):
        simple_plan(rate_rps=1e-9, seconds=1, input_tokens=1, output_tokens=1)


def test_plan_hashes_are_fixed() -> None:
    """A seed must make the same plan in every version. Every distribution of `loadgen.plan.draws` is
    covered."""
    shared = SharedPrompts(count=7, lengths=parse_lengths("lognormal:mean=100,cv=1"))
    think: Distribution = parse_times("lognormal:mean=5s,cv=2")
    assert hash_of(plan(*sessions(times(200), turns(think=think), seed=3, shared=shared))) == KNOWN


KNOWN = "7ae03df30abfe057de387fc230024c48f625f928236c46ddb99435d93b150011"


# Who the clients are.


def test_session_is_one_client() -> None:
    requests = sessions(times(300), turns(), seed=0)
    mixes = Mixes(
        tenants=Mix(("a", "b"), (3, 1)), priorities=Mix((0, 5), (1, 1)), classes=Mix(("x", "y"), (0.5, 0.5)), cancel=0.3
    )
    mixed = apply_mixes(requests, mixes, seed=0)
    clients = {r.session: (r.tenant, r.priority, r.slo_class) for r in mixed}
    assert all(clients[r.session] == (r.tenant, r.priority, r.slo_class) for r in mixed)
    assert Counter(tenant for tenant, _, _ in clients.values())["a"] == pytest.approx(225, abs=30)
    assert {(p, c) for _, p, c in clients.values()} == {(0, "x"), (0, "y"), (5, "x"), (5, "y")}
    followed = {r.after for r in mixed}
    cancelled = [r for r in mixed if r.cancel_after_tokens is not None]
    assert not any(r.index in followed for r in cancelled)
    assert len(cancelled) == pytest.approx(90, abs=32)
    check_plan(plan(*mixed, slos={"x": SloTarget(), "y": SloTarget()}))


def test_cancels_are_uniform_over_tokens() -> None:
    requests = [request(i, (i, 5), output=11) for i in range(20_000)]
    after = Counter(r.cancel_after_tokens for r in apply_mixes(requests, Mixes(cancel=0.5), seed=0))
    assert after.pop(None) == pytest.approx(10_000, abs=300)
    assert after.keys() == set(range(1, 11))
    assert list(after.values()) == pytest.approx([1000] * 10, rel=0.15)
    everyone = apply_mixes([request(0, (0, 1), output=1), request(1, (1, 1), output=2)], Mixes(cancel=1.0), seed=0)
    assert [r.cancel_after_tokens for r in everyone] == [None, 1]


def test_mixes_are_independent() -> None:
    requests = random_requests(100)
    a = apply_mixes(requests, Mixes(tenants=Mix(("a", "b"), (1, 1))), seed=0)
    b = apply_mixes(
        requests, Mixes(tenants=Mix(("a", "b"), (1, 1)), priorities=Mix((0, 1), (1, 1)), cancel=0.5), seed=0
    )
    assert [r.tenant for r in a] == [r.tenant for r in b]
    assert apply_mixes(requests, Mixes(), seed=0) == requests


def test_mix_texts_are_parsed() -> None:
    assert parse_tenants("a:3,b:1") == Mix(("a", "b"), (3.0, 1.0))
    assert parse_tenants("org:team:2") == Mix(("org:team",), (2.0,))
    assert parse_priorities("0:9, -5:1") == Mix((0, -5), (9.0, 1.0))
    mix, slos = parse_classes(["interactive:0.7:ttft=500ms,tpot=50ms", "batch:0.3"])
    assert mix == Mix(("interactive", "batch"), (0.7, 0.3))
    assert slos == {"interactive": SloTarget(ttft_s=0.5, tpot_s=0.05), "batch": SloTarget()}


@pytest.mark.parametrize(
    ("parse", "text", "message"),
    [
        (parse_tenants, "a", "`a` in `a`: write a:3,b:1"),
        (parse_tenants, "a:1,a:2", "`a:1,a:2` contains `a` twice"),
        (parse_tenants, "a:0", "a weight must be above 0"),
        (parse_tenants, "a:x", "`x` is not a number"),
        (parse_priorities, "high:1", "priorities must be integers"),
        (parse_classes, ["chat"], "`chat` is not a class; write interactive:0.7:ttft=500ms,tpot=50ms"),
        (parse_classes, ["a:1", "a:1"], "the class `a` is given twice"),
    ],
)
def test_invalid_mixes_are_rejected(parse: Any, text: Any, message: str) -> None:
    with pytest.raises(BadPlan) as caught:
        parse(text)
    assert message in str(caught.value)


def test_invalid_slo_is_reported() -> None:
    with pytest.raises(BadSlo, match="`ttft` is not an SLO"):
        parse_classes(["a:1:ttft"])
