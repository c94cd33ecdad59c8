"""What deciding in seconds means: which worker is chosen in which situation, and what is said to be expected of it."""

import math
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.cluster import ClusterSnapshot, PlacementQuery, Rejection, WorkerView
from baton.core.costs import StepWork
from baton.core.errors import Reason
from baton.core.ids import DecisionId
from baton.core.request import Slo
from baton.scheduler.columns import columns_of
from baton.scheduler.policies import POLICIES
from baton.scheduler.policies.choice import Choice, Prediction, Turn
from baton.scheduler.policies.kv_centric import RULES, kv_centric
from baton.scheduler.policies.prefix_aware import prefix_aware
from baton.scheduler.policies.ranking import choose
from baton.scheduler.view import ClusterView
from tests.builders import layout, query, worker_ref
from tests.unit.scheduler.costed import COSTS, LAYOUT, costed, decoding, fast_link, queued, random_cluster, seen

BLOCK_BYTES = LAYOUT.block_bytes
LONG = 4096
NAMES = ["kv_centric", "prefix_aware"]


def turn(number: int = 0, *, max_full_s: float | None = None) -> Turn:
    return Turn(number=number, seed=number, max_full_s=max_full_s)


def asked(num_prompt_tokens: int = LONG, **changes: object) -> PlacementQuery:
    return query(num_prompt_tokens=num_prompt_tokens, max_tokens=100, **changes)


def chosen(cluster: ClusterSnapshot, asking: PlacementQuery | None = None, policy: str = "kv_centric", **turns: bool) -> Choice:
    answer = POLICIES[policy](asking or asked(), cluster, turn(**turns))
    assert isinstance(answer, Choice), answer
    return answer


def ids(choice: Choice) -> tuple[str | None, str | None]:
    return (choice.prefill.worker_id if choice.prefill else None, choice.decode.worker_id if choice.decode else None)


def predicted(choice: Choice) -> Prediction:
    assert choice.predicted is not None
    return choice.predicted


def busy(worker_id: str = "d", seqs: int = 20, **changes: object) -> object:
    """A decode worker where nobody prefills for nothing."""
    return costed(worker_id, "decode", **decoding(seqs), **changes)


# -- the terms ---------------------------------------------------------------------------------------------------------------------------


def test_the_terms_of_a_placement_are_the_cost_models_seconds() -> None:
    p = costed("p", "prefill", **queued(1024))
    got = predicted(chosen(seen(p, busy(links=(fast_link("p", bytes_per_s=1e7),)), p=64)))
    assert got.queue_s == pytest.approx(COSTS.prefill_s(1024, 0, 512), rel=0.01)
    assert got.prefill_s == pytest.approx(COSTS.prefill_s(LONG - 64 * 16, 64 * 16, 512), rel=0.01)
    assert got.ttft_s == pytest.approx(got.queue_s + got.prefill_s)
    assert got.tpot_now_s == pytest.approx(COSTS.decode_step_s(21, 20 * 500 + LONG))
    last_chunk_s = 32 * BLOCK_BYTES / 1e7
    assert got.transfer_s >= last_chunk_s > 0, "at least the last chunk comes after the first token"


def test_live_corrections_count() -> None:
    slow = replace(COSTS, prefill_factor=3.0, decode_factor=2.0)
    plain, corrected = (predicted(chosen(seen(costed("p", "prefill", costs=costs), busy(costs=costs)))) for costs in (COSTS, slow))
    assert corrected.prefill_s == pytest.approx(3 * plain.prefill_s)
    assert corrected.tpot_now_s == pytest.approx(2 * (plain.tpot_now_s or 0))


def test_a_prompt_that_is_wholly_cached_still_computes_its_last_token() -> None:
    got = chosen(seen(costed("p", "prefill"), busy(), p=LONG // 16))
    assert got.prefill_overlap_blocks == LONG // 16 - 1
    assert predicted(got).prefill_s > 0


def test_tpot_is_of_the_moment_at_which_the_prompt_is_computed() -> None:
    short_answers, long_answers = (
        predicted(chosen(seen(costed("p", "prefill"), busy(mean_output_tokens=mean)))).tpot_s or 0 for mean in (20.0, 2000.0)
    )
    now_s = predicted(chosen(seen(costed("p", "prefill"), busy()))).tpot_now_s or 0
    assert short_answers < 0.8 * now_s, "most of those that decode now will have ended"
    assert long_answers == pytest.approx(now_s, rel=0.05)
    joined = predicted(chosen(seen(costed("p", "prefill"), busy(mean_output_tokens=2000.0, waiting_seqs=10)))).tpot_s or 0
    assert joined > long_answers * 1.1, "those that were placed before will have joined"


def test_of_those_that_join_before_some_have_ended_by_then() -> None:
    d = busy(mean_output_tokens=20.0, waiting_seqs=10)
    got = predicted(chosen(seen(costed("p", "prefill"), d)))
    lives = got.ttft_s / (20 * COSTS.decode_step_s(20, 20 * 500))
    stay = math.exp(-lives)
    join = (1 - stay) / lives
    seqs = 20 * stay + 10 * join
    assert got.tpot_s == pytest.approx(COSTS.decode_step_s(seqs + 1, 500 * seqs + LONG))


# -- who prefills ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", NAMES)
def test_a_cached_prefix_is_worth_what_computing_it_takes(policy: str) -> None:
    p0, p1 = costed("p0", "prefill"), costed("p1", "prefill")
    assert ids(chosen(seen(p0, p1, busy(), p1=128), policy=policy)) == ("p1", "d")
    far = replace(p1, waiting_prefill_tokens=9000, waiting_seqs=3)
    assert ids(chosen(seen(p0, far, busy(), p1=128), policy=policy))[0] == "p0", "but not a queue that is longer"


def test_a_prefix_is_pulled_when_that_is_faster_than_computing_it() -> None:
    p0, p1 = costed("p0", "prefill"), costed("p1", "prefill", **queued(20_000))
    got = chosen(seen(p0, p1, busy(), p1=200))
    assert (ids(got), got.prefix_source and got.prefix_source.worker, got.prefix_source and got.prefix_source.num_blocks) == (
        ("p0", "d"),
        worker_ref("p1"),
        200,
    )
    assert predicted(got).prefix_pull_s == pytest.approx(200 * BLOCK_BYTES / 1e9)
    assert predicted(got).prefill_s == pytest.approx(COSTS.prefill_s(LONG - 3200, 3200, 512))
    slow = replace(p0, links=(fast_link("p1", bytes_per_s=1e5),))
    assert chosen(seen(slow, p1, busy(), p1=200)).prefix_source is None
    crowded = replace(p0, links=(fast_link("p1", inflight_bytes=10**9),))
    assert chosen(seen(crowded, p1, busy(), p1=200)).prefix_source is None


def test_a_prefix_is_pulled_from_a_decode_worker_too_but_only_what_is_really_there() -> None:
    p = costed("p", "prefill")
    assert chosen(seen(p, busy(), d=200)).prefix_source is not None
    assert chosen(seen(p, busy(), d=(200, 0))).prefix_source is None, "that is only expected there"


def test_nothing_is_pulled_over_a_broken_link_or_from_another_layout_or_a_draining_worker() -> None:
    p = costed("p", "prefill")
    holder = costed("h", "prefill", **queued(50_000))
    assert chosen(seen(p, holder, busy(), h=200)).prefix_source is not None
    for cluster in (
        seen(replace(p, links=(fast_link("h", broken=True),)), holder, busy(), h=200),
        seen(p, replace(holder, layout=layout(block_size_tokens=16, model_fingerprint="b")), busy(), h=200),
        seen(p, replace(holder, state=type(holder.state).DRAINING), busy(), h=200),
    ):
        assert chosen(cluster).prefix_source is None


def test_what_a_decode_worker_only_expects_is_nothing_to_begin_with() -> None:
    """Blocks that a decode worker will read from who computes them cannot be had any sooner there."""
    cluster = seen(costed("p", "prefill", **queued(LONG)), costed("d", "decode"), costed("e", "decode"), p=(255, 0), d=(255, 0))
    got = chosen(cluster)
    assert ids(got)[0] == "p"
    assert predicted(got).ttft_s > COSTS.prefill_s(LONG, 0, 512)


def test_computing_what_another_will_have_soon_is_charged_once_more() -> None:
    """As soon as the queue in which it is computed already takes twice as long, it is worth it."""
    full_s = COSTS.prefill_s(LONG, 0, 512)
    for tokens, prefill in ((LONG, "p0"), (int(1.8 * LONG), "p0"), (int(2.3 * LONG), "p1")):
        cluster = seen(costed("p0", "prefill", **queued(tokens)), costed("p1", "prefill"), busy(), p0=(255, 0))
        assert ids(chosen(cluster))[0] == prefill, tokens
    assert predicted(chosen(cluster)).ttft_s == pytest.approx(full_s), "a charge is no part of what is predicted"
    shown = {c.worker.worker_id: c.terms for c in chosen(cluster).candidates if c.side == "prefill" and c.terms}
    assert shown["p1"]["redundant_s"] == pytest.approx(full_s * 4080 / LONG)


def test_a_decode_worker_that_computes_itself_pulls_too() -> None:
    holder = costed("h", "prefill", **queued(50_000))
    got = chosen(seen(holder, costed("d", "decode"), h=200))
    assert (ids(got), got.prefix_source and got.prefix_source.worker) == ((None, "d"), worker_ref("h"))
    assert predicted(got).prefix_pull_s == pytest.approx(200 * BLOCK_BYTES / 1e9)
    slow = costed("d", "decode", links=(fast_link("h", bytes_per_s=1e5),))
    assert chosen(seen(holder, slow, h=200)).prefix_source is None


def test_who_keeps_the_promise_goes_before_who_costs_less() -> None:
    """p0 has a queue, but nothing is to be sent; p1 is idle, over a slow link: its first token comes sooner, the second one later."""
    queue = costed("p0", "prefill", **queued(2048))
    slow = tuple(fast_link(name, bytes_per_s=rate) for name, rate in (("p0", 1e12), ("p1", 1.2e6)))
    cluster = seen(queue, costed("p1", "prefill"), busy(links=slow))
    assert ids(chosen(cluster))[0] == "p0"
    soon_s = COSTS.prefill_s(LONG, 0, 512) * 1.1
    assert ids(chosen(cluster, asked(slo=Slo(ttft_s=soon_s))))[0] == "p1"
    assert ids(chosen(cluster, asked(slo=Slo(ttft_s=soon_s), waited_s=soon_s)))[0] == "p0", "too late for both"


def test_what_decodes_nowhere_else_is_not_transferred() -> None:
    holder = costed("h", "prefill", **queued(50_000))
    got = chosen(seen(costed("p", "prefill"), holder, h=200), query(num_prompt_tokens=LONG, max_tokens=1))
    assert (ids(got), got.prefix_source and got.prefix_source.num_blocks) == (("p", None), 200)
    assert (predicted(got).prefix_pull_s > 0, predicted(got).transfer_s) == (True, 0.0)


def test_prefix_aware_never_pulls() -> None:
    assert (
        chosen(
            seen(costed("p0", "prefill"), costed("p1", "prefill", **queued(20_000)), busy(), p1=200), policy="prefix_aware"
        ).prefix_source
        is None
    )


def test_kv_that_comes_late_counts() -> None:
    d = busy(links=(fast_link("p0", bytes_per_s=1e5), fast_link("p1")))
    got = chosen(seen(costed("p0", "prefill"), costed("p1", "prefill", **queued(100)), d))
    assert ids(got) == ("p1", "d")
    crowded = busy(links=(fast_link("p0", inflight_bytes=10**10), fast_link("p1")))
    assert ids(chosen(seen(costed("p0", "prefill"), costed("p1", "prefill", **queued(100)), crowded))) == ("p1", "d")


# -- who decodes -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", NAMES)
def test_the_least_predicted_tpot_decodes(policy: str) -> None:
    p = costed("p", "prefill")
    assert ids(chosen(seen(p, busy("d0", 20), busy("d1", 10)), policy=policy))[1] == "d1"
    slow = replace(COSTS, decode_factor=5.0)
    assert ids(chosen(seen(p, busy("d0", 20), busy("d1", 10, costs=slow)), policy=policy))[1] == "d0"


def test_what_the_decode_worker_holds_counts() -> None:
    p, link = costed("p", "prefill"), (fast_link("p", bytes_per_s=1e7),)
    assert ids(chosen(seen(p, busy("d0", links=link), busy("d1", links=link))))[1] == "d0"
    assert ids(chosen(seen(p, busy("d0", links=link), busy("d1", links=link), d1=(200, 0))))[1] == "d1"


def test_a_worker_that_prefills_for_itself_decodes_slower() -> None:
    assert ids(chosen(seen(costed("p", "prefill"), busy("d0", waiting_prefill_tokens=50_000), busy("d1"))))[1] == "d1"


# -- the decode worker prefills ----------------------------------------------------------------------------------------------------------


def test_an_idle_decode_worker_takes_a_prompt_rather_than_wait_for_the_queue() -> None:
    long_queue = costed("p", "prefill", **queued(20_000))
    got = chosen(seen(long_queue, costed("d", "decode")), asked(64))
    assert ids(got) == (None, "d")
    assert (predicted(got).transfer_s, predicted(got).busy_s) == (0.0, 0.0)
    assert ids(chosen(seen(long_queue, costed("d", "decode")), asked(64), "prefix_aware")) == ("p", "d"), "that is kv_centric's own"


def test_the_delay_of_its_sequences_is_charged() -> None:
    p = costed("p", "prefill", **queued(1000))
    got = chosen(seen(p, busy(seqs=20)), asked(256))
    assert ids(got) == ("p", "d")
    alone = next(c for c in got.candidates if c.side == "prefill" and c.worker.worker_id == "d")
    assert alone.terms["busy_s"] == pytest.approx(20 * (COSTS.prefill_s(256) - COSTS.step_s), rel=0.01)
    assert ids(chosen(seen(p, busy(seqs=1)), asked(256))) == (None, "d"), "one that waits a little is less than a queue"


@pytest.mark.parametrize("promised", ["asking", "running", "running more strictly"])
def test_it_is_barred_where_a_chunk_would_break_a_promise(promised: str) -> None:
    p, d = costed("p", "prefill", **queued(50_000)), WorkerView(report=costed("d", "decode", **decoding(2)))
    assert ids(chosen(seen(p, d), asked(2048))) == (None, "d")
    if promised == "asking":
        assert ids(chosen(seen(p, d), asked(2048, slo=Slo(tpot_s=0.005)))) == ("p", "d")
        assert ids(chosen(seen(p, d), asked(2048, slo=Slo(tpot_s=0.3)))) == (None, "d")
    else:
        asking = asked(2048, slo=Slo(tpot_s=0.3 if promised == "running more strictly" else None))
        assert ids(chosen(seen(p, replace(d, tpot_slo_s=0.005)), asking)) == ("p", "d")


def test_without_anybody_else_it_prefills_whatever_is_promised() -> None:
    assert ids(chosen(seen(busy()), asked(2048, slo=Slo(tpot_s=0.001)))) == (None, "d")


def local_share(charges_busy: bool, tpot_slo_s: float | None) -> float:
    """Bursts of four short prompts arrive at one prefill worker, which is done with one before the next comes, and at one decode worker
    with sixteen sequences. Returns the share of the prompts that the decode worker prefilled."""
    view = ClusterView(silence_s=1e9, reservation_s=1e9)
    view.take_report(costed("p", "prefill"), 0.0)
    view.take_report(costed("d", "decode", **decoding(16)), 0.0)
    rules, alone, asking = replace(RULES, charges_busy=charges_busy), 0, asked(200, slo=Slo(tpot_s=tpot_slo_s))
    for burst in range(10):
        placed = [DecisionId(f"{burst}-{number}") for number in range(4)]
        for number, decision_id in enumerate(placed):
            answer = choose(asking, view.snapshot(0.0), turn(number), rules)
            assert isinstance(answer, Choice)
            alone += answer.prefill is None
            view.reserve(decision_id, asking, answer.placement(decision_id, "s", "kv_centric"), 0.0)
        counted = {"counted_decision_ids": tuple(placed), "report_seq": burst + 2}
        view.take_report(costed("p", "prefill", **counted), 0.0)
        view.take_report(costed("d", "decode", **decoding(16), **counted), 0.0)
    return alone / 40


def test_without_the_busy_term_disaggregation_undoes_itself_and_with_it_it_does_not() -> None:
    slo_s, contexts = 0.03, [500] * 16
    assert COSTS.step_seconds(StepWork.of([], contexts)) < slo_s < COSTS.step_seconds(StepWork.of([(200, 0)], contexts))
    assert local_share(charges_busy=False, tpot_slo_s=slo_s) >= 0.25, "prefill is at the decode worker, where each breaks the promise"
    assert local_share(charges_busy=True, tpot_slo_s=slo_s) == 0
    assert local_share(charges_busy=True, tpot_slo_s=None) == 0, "the charge alone is enough"


# -- load --------------------------------------------------------------------------------------------------------------------------------


def place_burst(number: int, overlaps: dict[str, int], policy: str = "kv_centric", workers: int = 4) -> list[Choice]:
    """Between two reports."""
    view = ClusterView(silence_s=1e9, reservation_s=1e9)
    for i in range(workers):
        view.take_report(costed(f"p{i}", "prefill"), 0.0)
        view.take_report(busy(f"d{i}"), 0.0)
    choices = []
    for n in range(number):
        cluster = view.snapshot(0.0, seen(**overlaps).overlaps)
        choice = chosen(cluster, policy=policy)
        view.reserve(DecisionId(str(n)), asked(), choice.placement(DecisionId(str(n)), "s", policy), 0.0)
        choices.append(choice)
    return choices


@pytest.mark.parametrize("policy", ["kv_centric", "prefix_aware", "least_loaded"])
def test_a_burst_between_two_reports_does_not_pile_up(policy: str) -> None:
    placed = [ids(choice) for choice in place_burst(16, {}, policy)]
    for side in (0, 1):
        assert all(3 <= [pair[side] for pair in placed].count(name) <= 5 for name in {pair[side] for pair in placed})
        assert len({pair[side] for pair in placed}) == 4


def test_a_hot_prefix_does_not_draw_all_load_to_the_worker_that_holds_it() -> None:
    choices = place_burst(40, {"p0": 250})
    counts = {f"p{i}": sum(ids(choice)[0] == f"p{i}" for choice in choices) for i in range(4)}
    assert max(counts.values()) <= 16
    assert min(counts.values()) >= 4
    elsewhere = [choice for choice in choices if ids(choice)[0] != "p0"]
    assert all(choice.prefix_source is not None for choice in elsewhere), "the others pull it"


def test_a_burst_of_one_new_prefix_follows_where_it_is_expected() -> None:
    choices = place_burst(4, {"p2": 250})
    assert ids(choices[0])[0] == "p2"


# -- without costs -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", NAMES)
def test_without_any_costs_load_decides_and_nothing_is_predicted(policy: str) -> None:
    cluster = seen(costed("p0", "prefill", costs=None, **queued(900)), costed("p1", "prefill", costs=None), busy(costs=None))
    got = chosen(cluster, policy=policy)
    assert (ids(got), got.predicted) == (("p1", "d"), None)
    assert got.candidates[0].terms.keys() == {"queued_prefill_tokens", "seqs", "free_blocks"}


def test_a_worker_that_has_not_measured_itself_yet_is_taken_for_its_peers() -> None:
    got = chosen(seen(costed("p0", "prefill", **queued(900)), costed("p1", "prefill", costs=None), busy()))
    assert ids(got) == ("p1", "d")
    assert predicted(got).prefill_s == pytest.approx(COSTS.prefill_s(LONG, 0, 512), rel=0.01)
    told = {c.worker.worker_id: c.terms.get("borrowed_costs") for c in got.candidates if not c.excluded}
    assert told == {"p0": None, "p1": 1.0, "d": None}


def test_costs_that_cannot_be_seconds_are_no_costs() -> None:
    nonsense = replace(COSTS, prefill_token_s=float("nan"))
    assert chosen(seen(costed("p", "prefill", costs=nonsense), busy(costs=nonsense))).predicted is None


# -- full workers ------------------------------------------------------------------------------------------------------------------------


def full(worker_id: str, role: str) -> object:
    report = costed(worker_id, role)
    return replace(report, blocks=replace(report.blocks, free=10, used=9990))


@pytest.mark.parametrize("policy", POLICIES)
def test_nobody_is_placed_on_a_full_worker_when_another_has_room(policy: str) -> None:
    cluster = seen(full("p0", "prefill"), costed("p1", "prefill", **queued(9999)), full("d0", "decode"), busy("d1", max_num_seqs=64))
    assert ids(chosen(cluster, policy=policy)) == ("p1", "d1")


@pytest.mark.parametrize("policy", POLICIES)
def test_when_everybody_is_full_the_answer_is_no_but_not_to_a_request_that_lost_a_worker(policy: str) -> None:
    no_place = busy("d", 64)
    for cluster in (seen(costed("p", "prefill"), full("d", "decode")), seen(costed("p", "prefill"), no_place)):
        answer = POLICIES[policy](asked(), cluster, turn(max_full_s=0.0))
        assert isinstance(answer, Rejection)
        assert (answer.reason, answer.term) == (Reason.NO_CAPACITY, "decode_room")
        assert ids(chosen(cluster, asked(attempt=1), policy, max_full_s=0.0))[1] == "d"
        assert ids(chosen(cluster, asked(), policy))[1] == "d", "where nobody can wait at the scheduler, it waits there"


def test_a_full_prefill_side_leaves_the_decode_worker() -> None:
    assert ids(chosen(seen(full("p", "prefill"), busy()), max_full_s=0.0)) == (None, "d")
    answer = prefix_aware(asked(), seen(full("p", "prefill"), busy()), turn(max_full_s=0.0))
    assert isinstance(answer, Rejection)
    assert answer.term == "prefill_room"


def test_a_full_decode_worker_that_will_have_room_soon_enough_is_not_waited_for() -> None:
    """64 of 64 places are taken; one in 64 ends in a 64th of a mean answer."""
    crowded = seen(costed("p", "prefill"), busy("d", 64))
    assert isinstance(kv_centric(asked(), crowded, turn(max_full_s=0.001)), Rejection)
    assert ids(chosen(crowded, max_full_s=1.0)) == ("p", "d")


# -- rules that hold always --------------------------------------------------------------------------------------------------------------


@given(seed=st.integers(0, 1_000_000), name=st.sampled_from(sorted(POLICIES)), refuse_full=st.booleans())
def test_policies_repeat_themselves_and_never_place_on_dead_draining_or_full_workers(seed: int, name: str, refuse_full: bool) -> None:
    random = Random(seed)
    cluster = random_cluster(random)
    asking = asked(
        random.choice([1, 15, 16, 100, 500, 2000]), slo=Slo(tpot_s=random.choice([None, 0.02])), sample_count=random.choice([1, 3])
    )
    answer = POLICIES[name](asking, cluster, turn(seed, max_full_s=0.0 if refuse_full else None))
    shuffled = list(cluster.workers)
    random.shuffle(shuffled)
    again = POLICIES[name](asking, replace(seen(*shuffled), overlaps=cluster.overlaps), turn(seed, max_full_s=0.0 if refuse_full else None))
    assert answer == again
    if isinstance(answer, Rejection):
        return
    assert answer.prefill is not None or answer.decode is not None
    assert answer.prefill is None or answer.decode is None or answer.prefill.worker_id != answer.decode.worker_id
    for worker, decodes in ((answer.prefill, False), (answer.decode, True)):
        if worker is None:
            continue
        assert worker in cluster.workers
        assert worker.report.state.value == "ready"
        assert worker.report.model == "demo"
        if refuse_full:
            blocks_needed = -(-(asking.num_prompt_tokens + asking.sample_count) // worker.report.layout.block_size_tokens)
            assert blocks_needed <= worker.num_free_blocks
            assert not decodes or worker.num_seqs + asking.sample_count <= worker.report.max_num_seqs
    if answer.prefill is not None and answer.decode is not None:
        assert answer.prefill.report.layout == answer.decode.report.layout
        assert all(link.peer.worker_id != answer.prefill.worker_id or not link.broken for link in answer.decode.report.links)
    if answer.prefix_source is not None:
        reader = answer.prefill or answer.decode
        assert reader is not None
        holder = next(w for w in cluster.workers if w.worker == answer.prefix_source.worker)
        assert holder.worker_id != reader.worker_id
        assert answer.prefix_source.num_blocks <= cluster.overlaps[holder.worker_id].num_held_blocks
        assert holder.report.layout == reader.report.layout
    if answer.predicted is not None:
        p = answer.predicted
        assert all(0 <= value < 1e6 for value in (p.queue_s, p.prefix_pull_s, p.prefill_s, p.transfer_s, p.busy_s, p.ttft_s))


@given(seed=st.integers(0, 1_000_000))
def test_columns_that_were_kept_are_those_that_a_snapshot_would_make(seed: int) -> None:
    random = Random(seed)
    view = ClusterView(silence_s=5.0, reservation_s=3.0)
    open_ids: list[DecisionId] = []
    for step in range(random.randrange(30)):
        name = f"w{random.randrange(4)}"
        match random.randrange(5):
            case 0 | 1:
                drawn = random_cluster(random, 5)
                for each in drawn.workers:
                    counted = tuple(random.sample(open_ids, min(len(open_ids), 2)))
                    view.take_report(replace(each.report, report_seq=step, counted_decision_ids=counted), float(step))
            case 2:
                view.lose(worker_ref(name))
            case 3:
                answer = kv_centric(asked(200, slo=Slo(tpot_s=0.1)), view.snapshot(float(step), seen(w1=9).overlaps), turn(step))
                if isinstance(answer, Choice):
                    open_ids.append(DecisionId(str(step)))
                    view.reserve(open_ids[-1], asked(200, slo=Slo(tpot_s=0.1)), answer.placement(open_ids[-1], "s", "x"), float(step))
            case 4:
                if open_ids:
                    view.release(random.choice(open_ids), ("w0", "w1", "w2", "w3"))
        kept = view.snapshot(float(step))
        fresh = replace(kept)
        assert "columns" not in fresh.derived
        ours, theirs = columns_of(kept), columns_of(fresh)
        assert [ours.kinds[int(k)] for k in ours.kind] == [theirs.kinds[int(k)] for k in theirs.kind]
        assert (ours.numbers[1:] == theirs.numbers[1:]).all()
        for table in ("s_per_byte", "queued_s", "is_broken", "is_warm"):
            assert (getattr(ours.links, table) == getattr(theirs.links, table)).all(), table


def test_a_snapshot_stays_as_it_was() -> None:
    view = ClusterView(silence_s=1e9, reservation_s=1e9)
    view.take_report(costed("p", "prefill"), 0.0)
    view.take_report(busy(links=(fast_link("p"),)), 0.0)
    before = view.snapshot(0.0)
    first = chosen(before)
    view.reserve(DecisionId("1"), asked(), first.placement(DecisionId("1"), "s", "x"), 0.0)
    view.take_report(busy(report_seq=2, links=(fast_link("p", broken=True),)), 0.0)
    assert chosen(before) == first
    assert ids(chosen(view.snapshot(0.0))) == (None, "d")
