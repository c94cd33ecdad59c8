"""The policies that predict seconds: which workers they choose in which situation, and what they predict."""

import math
from dataclasses import replace

import pytest

from baton.core.cluster.cluster_snapshot import WorkerView
from baton.core.ids import DecisionId
from baton.core.request import NO_SLO, Slo
from baton.core.step_targets import PLANNED_SHARE
from baton.scheduler.policies.kv_centric import kv_centric
from baton.scheduler.policies.policy_types import Choice
from baton.scheduler.state.cluster_state import ClusterState
from baton.scheduler.state.worker_links import DEFAULT_DIAL_S, DEFAULT_PULL_S
from tests.builders import layout, query, worker_ref
from tests.unit.scheduler.measured_workers import COSTS, LAYOUT, decoding, fast_link, measured, queued, seen
from tests.unit.scheduler.policy_cases import LONG, NAMES, asked, busy, chosen, context, ids, predicted

BLOCK_BYTES = LAYOUT.block_bytes


# the terms


def test_predicted_terms_equal_the_cost_model() -> None:
    p = measured("p", "prefill", **queued(1024))
    got = predicted(chosen(seen(p, busy(links=(fast_link("p", bytes_per_s=1e7),)), p=64)))
    assert got.queue_s == pytest.approx(COSTS.prefill_s(1024, 0, 512), rel=0.01)
    assert got.prefill_s == pytest.approx(COSTS.prefill_s(LONG - 64 * 16, 64 * 16, 512), rel=0.01)
    assert got.ttft_s == pytest.approx(got.queue_s + got.prefill_s)
    assert got.tpot_now_s == pytest.approx(COSTS.decode_step_s(21, 20 * 500 + LONG))
    last_chunk_s = 32 * BLOCK_BYTES / 1e7
    assert got.transfer_s >= last_chunk_s > 0, "at least the last chunk is exposed"


def test_live_cost_corrections_apply() -> None:
    slow = replace(COSTS, prefill_factor=3.0, decode_factor=2.0)
    plain, corrected = (
        predicted(chosen(seen(measured("p", "prefill", costs=costs), busy(costs=costs)))) for costs in (COSTS, slow)
    )
    assert corrected.prefill_s == pytest.approx(3 * plain.prefill_s)
    assert corrected.tpot_now_s == pytest.approx(2 * (plain.tpot_now_s or 0))


def test_fully_cached_prompt_still_computes_its_last_token() -> None:
    got = chosen(seen(measured("p", "prefill"), busy(), p=LONG // 16))
    assert got.prefill_overlap_blocks == LONG // 16 - 1
    assert predicted(got).prefill_s > 0


def test_tpot_is_predicted_for_the_end_of_prefill() -> None:
    short_answers, long_answers = (
        predicted(chosen(seen(measured("p", "prefill"), busy(mean_output_tokens=mean)))).tpot_s or 0
        for mean in (20.0, 2000.0)
    )
    now_s = predicted(chosen(seen(measured("p", "prefill"), busy()))).tpot_now_s or 0
    assert short_answers < 0.8 * now_s, "most of the decoding sequences will have ended"
    assert long_answers == pytest.approx(now_s, rel=0.05)
    joined = (
        predicted(chosen(seen(measured("p", "prefill"), busy(mean_output_tokens=2000.0, waiting_seqs=10)))).tpot_s or 0
    )
    assert joined > long_answers * 1.1, "sequences placed before will have joined"


def test_some_joining_sequences_end_before_prefill_does() -> None:
    d = busy(mean_output_tokens=20.0, waiting_seqs=10)
    got = predicted(chosen(seen(measured("p", "prefill"), d)))
    num_drains = got.ttft_s / (20 * COSTS.decode_step_s(20, 20 * 500))
    stay = math.exp(-num_drains)
    join = (1 - stay) / num_drains
    seqs = 20 * stay + 10 * join
    assert got.tpot_s == pytest.approx(COSTS.decode_step_s(seqs + 1, 500 * seqs + LONG))


@pytest.mark.parametrize(("mean", "num_tokens"), [(20.0, 20), (2000.0, 100)])
def test_answer_is_predicted_to_be_as_long_as_others_if_the_request_allows_it(mean: float, num_tokens: int) -> None:
    got = predicted(chosen(seen(measured("p", "prefill"), busy(mean_output_tokens=mean))))
    assert got.answer_s == pytest.approx(num_tokens * (got.tpot_s or 0))


# who prefills


@pytest.mark.parametrize("policy", NAMES)
def test_cached_prefix_counts_as_its_compute_time(policy: str) -> None:
    p0, p1 = measured("p0", "prefill"), measured("p1", "prefill")
    assert ids(chosen(seen(p0, p1, busy(), p1=128), policy=policy)) == ("p1", "d")
    far = replace(p1, waiting_prefill_tokens=9000, waiting_seqs=3)
    assert ids(chosen(seen(p0, far, busy(), p1=128), policy=policy))[0] == "p0", "but not as a longer queue"


def test_prefix_is_pulled_if_faster_than_computing_it() -> None:
    p0, p1 = measured("p0", "prefill"), measured("p1", "prefill", **queued(20_000))
    got = chosen(seen(p0, p1, busy(), p1=200))
    assert (
        ids(got),
        got.prefix_source and got.prefix_source.worker,
        got.prefix_source and got.prefix_source.num_blocks,
    ) == (
        ("p0", "d"),
        worker_ref("p1"),
        200,
    )
    assert predicted(got).prefix_pull_s == pytest.approx(200 * BLOCK_BYTES / 1e9 + DEFAULT_PULL_S + DEFAULT_DIAL_S)
    assert predicted(got).prefill_s == pytest.approx(COSTS.prefill_s(LONG - 3200, 3200, 512))
    slow = replace(p0, links=(fast_link("p1", bytes_per_s=1e5),))
    assert chosen(seen(slow, p1, busy(), p1=200)).prefix_source is None
    crowded = replace(p0, links=(fast_link("p1", inflight_bytes=10**9),))
    assert chosen(seen(crowded, p1, busy(), p1=200)).prefix_source is None


def test_prefix_is_pulled_from_a_decode_worker_but_not_if_only_expected_there() -> None:
    p = measured("p", "prefill")
    assert chosen(seen(p, busy(), d=200)).prefix_source is not None
    assert chosen(seen(p, busy(), d=(200, 0))).prefix_source is None, "the blocks are only expected there"


def test_no_pull_over_a_broken_link_or_from_another_layout_or_a_draining_worker() -> None:
    p = measured("p", "prefill")
    holder = measured("h", "prefill", **queued(50_000))
    assert chosen(seen(p, holder, busy(), h=200)).prefix_source is not None
    for cluster in (
        seen(replace(p, links=(fast_link("h", broken=True),)), holder, busy(), h=200),
        seen(p, replace(holder, layout=layout(block_size_tokens=16, model_fingerprint="b")), busy(), h=200),
        seen(p, replace(holder, state=type(holder.state).DRAINING), busy(), h=200),
    ):
        assert chosen(cluster).prefix_source is None


def test_expected_blocks_do_not_shorten_a_local_prefill() -> None:
    """The decode worker will read these blocks from the worker that computes them."""
    cluster = seen(
        measured("p", "prefill", **queued(LONG)),
        measured("d", "decode"),
        measured("e", "decode"),
        p=(255, 0),
        d=(255, 0),
    )
    got = chosen(cluster)
    assert ids(got)[0] == "p"
    assert predicted(got).ttft_s > COSTS.prefill_s(LONG, 0, 512)


def test_redundant_prefill_is_charged_twice() -> None:
    """Computing again pays only if the queue of the worker that computes it takes twice as long."""
    full_s = COSTS.prefill_s(LONG, 0, 512)
    for tokens, prefill in ((LONG, "p0"), (int(1.8 * LONG), "p0"), (int(2.3 * LONG), "p1")):
        cluster = seen(measured("p0", "prefill", **queued(tokens)), measured("p1", "prefill"), busy(), p0=(255, 0))
        assert ids(chosen(cluster))[0] == prefill, tokens
    assert predicted(chosen(cluster)).ttft_s == pytest.approx(full_s), "a charge is not part of the prediction"
    shown = {c.worker.worker_id: c.terms for c in chosen(cluster).candidates if c.side == "prefill" and c.terms}
    assert shown["p1"]["redundant_s"] == pytest.approx(full_s * 4080 / LONG)


def test_local_prefill_can_pull_a_prefix() -> None:
    holder = measured("h", "prefill", **queued(50_000))
    got = chosen(seen(holder, measured("d", "decode"), h=200))
    assert (ids(got), got.prefix_source and got.prefix_source.worker) == ((None, "d"), worker_ref("h"))
    assert predicted(got).prefix_pull_s == pytest.approx(200 * BLOCK_BYTES / 1e9 + DEFAULT_PULL_S + DEFAULT_DIAL_S)
    slow = measured("d", "decode", links=(fast_link("h", bytes_per_s=1e5),))
    assert chosen(seen(holder, slow, h=200)).prefix_source is None


def test_worker_that_meets_the_slo_is_preferred_to_a_cheaper_one() -> None:
    """p0 has a queue and a fast link; p1 is idle with a slow link, so only its first token is sooner."""
    queue = measured("p0", "prefill", **queued(2048))
    slow = tuple(fast_link(name, bytes_per_s=rate) for name, rate in (("p0", 1e12), ("p1", 1.2e6)))
    cluster = seen(queue, measured("p1", "prefill"), busy(links=slow))
    assert ids(chosen(cluster))[0] == "p0"
    soon_s = COSTS.prefill_s(LONG, 0, 512) * 1.1
    assert ids(chosen(cluster, asked(slo=Slo(ttft_s=soon_s))))[0] == "p1"
    assert ids(chosen(cluster, asked(slo=Slo(ttft_s=soon_s), waited_s=soon_s)))[0] == "p0", "too late on both"


def test_prefill_only_request_has_no_transfer() -> None:
    holder = measured("h", "prefill", **queued(50_000))
    got = chosen(seen(measured("p", "prefill"), holder, h=200), query(num_prompt_tokens=LONG, max_tokens=1))
    assert (ids(got), got.prefix_source and got.prefix_source.num_blocks) == (("p", None), 200)
    assert (predicted(got).prefix_pull_s > 0, predicted(got).transfer_s) == (True, 0.0)


def test_prefix_aware_never_pulls() -> None:
    assert (
        chosen(
            seen(measured("p0", "prefill"), measured("p1", "prefill", **queued(20_000)), busy(), p1=200),
            policy="prefix_aware",
        ).prefix_source
        is None
    )


def test_exposed_transfer_counts() -> None:
    d = busy(links=(fast_link("p0", bytes_per_s=1e5), fast_link("p1")))
    got = chosen(seen(measured("p0", "prefill"), measured("p1", "prefill", **queued(100)), d))
    assert ids(got) == ("p1", "d")
    crowded = busy(links=(fast_link("p0", inflight_bytes=10**10), fast_link("p1")))
    assert ids(chosen(seen(measured("p0", "prefill"), measured("p1", "prefill", **queued(100)), crowded))) == (
        "p1",
        "d",
    )


# who decodes


@pytest.mark.parametrize("policy", NAMES)
def test_the_least_predicted_tpot_decodes(policy: str) -> None:
    p = measured("p", "prefill")
    assert ids(chosen(seen(p, busy("d0", 20), busy("d1", 10)), policy=policy))[1] == "d1"
    slow = replace(COSTS, decode_factor=5.0)
    assert ids(chosen(seen(p, busy("d0", 20), busy("d1", 10, costs=slow)), policy=policy))[1] == "d0"


def test_blocks_held_by_the_decode_worker_count() -> None:
    p, link = measured("p", "prefill"), (fast_link("p", bytes_per_s=1e7),)
    assert ids(chosen(seen(p, busy("d0", links=link), busy("d1", links=link))))[1] == "d0"
    assert ids(chosen(seen(p, busy("d0", links=link), busy("d1", links=link), d1=(200, 0))))[1] == "d1"


def test_queued_prefill_slows_decode() -> None:
    assert ids(chosen(seen(measured("p", "prefill"), busy("d0", waiting_prefill_tokens=50_000), busy("d1"))))[1] == "d1"


@pytest.mark.parametrize("policy", NAMES)
def test_recent_prefill_share_slows_decode(policy: str) -> None:
    p = measured("p", "prefill")
    got = chosen(seen(p, busy("d0", 8, recent_prefill_share=0.6), busy("d1", 10)), policy=policy)
    assert ids(got)[1] == "d1"
    terms = {c.worker.worker_id: c.terms for c in got.candidates if c.side == "decode"}
    assert terms["d0"]["recent_prefill_share"] == 0.6
    assert terms["d0"]["tpot_s"] > 2 * terms["d1"]["tpot_s"]
    assert "recent_prefill_share" not in terms["d1"]


# what is evicted for a prompt


def hybrid(name: str, *, seqs: int, evicted_reuse: float) -> WorkerView:
    links = tuple(fast_link(peer) for peer in ("h0", "h1") if peer != name)
    report = measured(name, "hybrid", evicted_reuse=evicted_reuse, links=links, **decoding(seqs, 100))
    return WorkerView(report=report)


@pytest.mark.parametrize(("evicted_reuse", "decode"), [(0.0, "h1"), (0.5, "h0")])
def test_a_session_stays_where_its_kv_is_while_caches_are_full(evicted_reuse: float, decode: str) -> None:
    """The other worker is less busy, and would pull the KV in no time."""
    h0, h1 = (hybrid(name, seqs=seqs, evicted_reuse=evicted_reuse) for name, seqs in (("h0", 6), ("h1", 4)))
    assert ids(chosen(seen(h0, h1, h0=LONG // 16)))[1] == decode


def test_charge_for_evicted_kv_is_shown_and_is_no_part_of_the_prediction() -> None:
    full, other = measured("p0", "prefill", evicted_reuse=0.25), measured("p1", "prefill", evicted_reuse=0.0)
    got = chosen(seen(full, other, busy()))
    terms = {c.worker.worker_id: c.terms for c in got.candidates if c.side == "prefill" and c.terms}
    assert ids(got)[0] == "p1"
    assert terms["p0"]["displaced_s"] == pytest.approx(0.25 * terms["p0"]["prefill_s"])
    assert terms["p0"]["cost_s"] - terms["p0"]["displaced_s"] == pytest.approx(terms["p1"]["cost_s"])
    assert "displaced_s" not in terms["p1"]
    alone = chosen(seen(full, busy()))
    assert predicted(alone).ttft_s == pytest.approx(predicted(got).ttft_s)


def test_other_policies_charge_nothing_for_evicted_kv() -> None:
    full, other = measured("p0", "prefill", evicted_reuse=1.0), measured("p1", "prefill")
    assert ids(chosen(seen(full, other, busy()), policy="prefix_aware"))[0] == "p0"


# the decode worker prefills


def test_idle_decode_worker_prefills_instead_of_a_long_queue() -> None:
    long_queue = measured("p", "prefill", **queued(20_000))
    got = chosen(seen(long_queue, measured("d", "decode")), asked(64))
    assert ids(got) == (None, "d")
    assert predicted(got).transfer_s == 0.0
    assert ids(chosen(seen(long_queue, measured("d", "decode")), asked(64), "prefix_aware")) == ("p", "d"), (
        "only kv_centric prefills on a decode worker"
    )


def test_decode_worker_prefills_in_the_share_of_its_steps_that_it_can_spare() -> None:
    """The more it decodes, the longer a prompt takes there. The queue elsewhere decides when that pays."""
    prompts, idle_s = asked(2048), COSTS.prefill_s(2048, 0, 512)
    times_s = []
    for seqs in (0, 1, 4, 8):
        got = chosen(seen(measured("p", "prefill", **queued(200_000)), busy(seqs=seqs)), prompts)
        assert ids(got) == (None, "d")
        times_s.append(predicted(got).ttft_s)
    assert times_s[0] == pytest.approx(idle_s)
    assert times_s == sorted(times_s)
    assert idle_s < times_s[1] < times_s[3] < 20 * idle_s
    for num_queued, prefill in ((100, "p"), (1_000, "p"), (6_000, None)):
        assert ids(chosen(seen(measured("p", "prefill", **queued(num_queued)), busy(seqs=2)), prompts))[0] == prefill


def test_decode_worker_without_anything_to_spare_prefills_only_if_no_other_can() -> None:
    """With 40 sequences a decode step takes ten times as long as with one."""
    p, d = measured("p", "prefill", **queued(100_000)), busy(seqs=40)
    assert ids(chosen(seen(p, d), asked(2048))) == ("p", "d")
    assert ids(chosen(seen(d), asked(2048))) == (None, "d")


@pytest.mark.parametrize("slo_of", ["report", "placements"])
def test_strict_tpot_slo_leaves_less_for_prompts_on_a_decode_worker(slo_of: str) -> None:
    """Its steps of 3 ms may take 7 ms by derived targets, and hardly longer by the SLO."""
    d, prompts = WorkerView(report=measured("d", "decode", **decoding(2))), asked(2048)
    decode_s = COSTS.decode_step_s(2, 1000)
    if slo_of == "report":
        strict = replace(d, report=replace(d.report, target_step_s=1.05 * decode_s))
    else:
        strict = replace(d, tpot_slo_s=1.05 * decode_s / PLANNED_SHARE)
    long_queue, queue = (measured("p", "prefill", **queued(num_tokens)) for num_tokens in (100_000, 4_000))
    loose_s, strict_s = (predicted(chosen(seen(long_queue, each), prompts)).ttft_s for each in (d, strict))
    assert strict_s > 1.3 * loose_s
    assert ids(chosen(seen(queue, d), prompts)) == (None, "d")
    assert ids(chosen(seen(queue, strict), prompts)) == ("p", "d")


def test_explain_shows_derived_targets_and_slos() -> None:
    """Derived ones follow from the costs and factors of each worker."""

    def terms_of(slo: Slo, waited_s: float = 0.0) -> dict[str, float]:
        factors = {"ttft_target_factor": 5.0, "tpot_target_factor": 2.0}
        d = measured("d", "decode", **factors)
        got = chosen(seen(measured("p", "prefill", **factors), d), asked(1024, slo=slo, waited_s=waited_s))
        return {name: value for c in got.candidates for name, value in c.terms.items() if "target" in name}

    assert terms_of(NO_SLO, 0.1) == pytest.approx(
        {
            "ttft_target_s": 5 * COSTS.prefill_s(1024, 0, 512) - 0.1,
            "tpot_target_s": 2 * COSTS.decode_step_s(1, 1024),
        }
    )
    assert terms_of(Slo(ttft_s=0.7, tpot_s=0.02)) == {"ttft_target_s": 0.7, "tpot_target_s": 0.02}


def test_decode_worker_prefills_despite_the_slo_if_it_is_the_only_one() -> None:
    assert ids(chosen(seen(busy()), asked(2048, slo=Slo(tpot_s=0.001)))) == (None, "d")


def test_bursts_use_what_the_decode_worker_can_spare() -> None:
    """Bursts of eight prompts meet one prefill worker and one decode worker with two sequences.

    Each burst is done before the next one arrives. The decode worker takes some prompts, the prefill worker
    most of them.
    """
    view = ClusterState(silence_s=1e9, reservation_s=1e9)
    view.update(measured("p", "prefill"), 0.0)
    view.update(measured("d", "decode", **decoding(2)), 0.0)
    num_local, asking = 0, asked(800)
    for burst in range(5):
        placed = [DecisionId(f"{burst}-{number}") for number in range(8)]
        for number, decision_id in enumerate(placed):
            answer = kv_centric(asking, view.snapshot(0.0), context(number))
            assert isinstance(answer, Choice)
            num_local += answer.prefill is None
            view.reserve(decision_id, asking, answer.placement(decision_id, "s", "kv_centric"), 0.0)
        counted = {"counted_decision_ids": tuple(placed), "report_seq": burst + 2}
        view.update(measured("p", "prefill", **counted), 0.0)
        view.update(measured("d", "decode", **decoding(2), **counted), 0.0)
    assert 1 <= num_local / 5 <= 4


# without costs


@pytest.mark.parametrize("policy", NAMES)
def test_without_costs_load_decides_and_nothing_is_predicted(policy: str) -> None:
    cluster = seen(
        measured("p0", "prefill", costs=None, **queued(900)), measured("p1", "prefill", costs=None), busy(costs=None)
    )
    got = chosen(cluster, policy=policy)
    assert (ids(got), got.predicted) == (("p1", "d"), None)
    assert got.candidates[0].terms.keys() == {"queued_prefill_tokens", "seqs", "free_blocks"}


def test_unmeasured_worker_gets_the_costs_of_its_peers() -> None:
    got = chosen(seen(measured("p0", "prefill", **queued(900)), measured("p1", "prefill", costs=None), busy()))
    assert ids(got) == ("p1", "d")
    assert predicted(got).prefill_s == pytest.approx(COSTS.prefill_s(LONG, 0, 512), rel=0.01)
    peer_costs = {c.worker.worker_id: c.terms.get("peer_costs") for c in got.candidates if not c.excluded}
    assert peer_costs == {"p0": None, "p1": 1.0, "d": None}


def test_unusable_costs_count_as_none() -> None:
    nonsense = replace(COSTS, prefill_token_s=float("nan"))
    assert chosen(seen(measured("p", "prefill", costs=nonsense), busy(costs=nonsense))).predicted is None
