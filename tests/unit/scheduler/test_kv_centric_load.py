"""Bursts between two reports, and full workers."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from baton.core.cluster.placement import Rejection
from baton.core.errors import Reason
from baton.core.ids import DecisionId
from baton.scheduler.policies import POLICIES
from baton.scheduler.policies.kv_centric import kv_centric
from baton.scheduler.policies.policy_types import Choice
from baton.scheduler.policies.prefix_aware import prefix_aware
from baton.scheduler.state.cluster_state import ClusterState
from tests.unit.scheduler.measured_workers import COSTS, measured, queued, seen
from tests.unit.scheduler.policy_cases import LONG, NAMES, asked, busy, chosen, context, ids


def place_burst(
    number: int, overlaps: dict[str, int], policy: str = "kv_centric", workers: Sequence[object] | None = None
) -> list[Choice]:
    """Place `number` requests between two reports, on four workers of each role or on those given."""
    view = ClusterState(silence_s=1e9, reservation_s=1e9)
    for report in workers or [each for i in range(4) for each in (measured(f"p{i}", "prefill"), busy(f"d{i}"))]:
        view.update(report, 0.0)
    choices = []
    for n in range(number):
        cluster = view.snapshot(0.0, seen(**overlaps).overlaps)
        choice = chosen(cluster, policy=policy)
        view.reserve(DecisionId(str(n)), asked(), choice.placement(DecisionId(str(n)), "s", policy), 0.0)
        choices.append(choice)
    return choices


@pytest.mark.parametrize("policy", ["kv_centric", "prefix_aware", "least_loaded"])
def test_burst_between_two_reports_is_spread(policy: str) -> None:
    placed = [ids(choice) for choice in place_burst(16, {}, policy)]
    for side in (0, 1):
        assert all(3 <= [pair[side] for pair in placed].count(name) <= 5 for name in {pair[side] for pair in placed})
        assert len({pair[side] for pair in placed}) == 4


def test_hot_prefix_does_not_attract_all_load_to_its_holder() -> None:
    choices = place_burst(40, {"p0": 250})
    counts = {f"p{i}": sum(ids(choice)[0] == f"p{i}" for choice in choices) for i in range(4)}
    assert max(counts.values()) <= 16
    assert min(counts.values()) >= 4
    elsewhere = [choice for choice in choices if ids(choice)[0] != "p0"]
    assert all(choice.prefix_source is not None for choice in elsewhere), "other workers pull the prefix"


def test_burst_with_one_prefix_goes_where_it_is_expected() -> None:
    choices = place_burst(4, {"p2": 250})
    assert ids(choices[0])[0] == "p2"


# full workers


@pytest.mark.parametrize("policy", NAMES)
@pytest.mark.parametrize("cached_blocks", [0, LONG // 16])
def test_burst_that_finds_all_decode_workers_full_is_spread(policy: str, cached_blocks: int) -> None:
    """All steps take the same time, so only the wait for a batch slot differs, and the read of the prefix."""
    costs = replace(COSTS, decode_seq_s=0.0, decode_context_s=0.0)
    decodes = [busy(name, 4, max_num_seqs=4, mean_output_tokens=20.0, costs=costs) for name in ("d0", "d1")]
    prefills = [measured(f"p{i}", "prefill") for i in range(4)]
    choices = place_burst(60, {"d0": cached_blocks} if cached_blocks else {}, policy, [*prefills, *decodes])
    assert 28 <= [ids(choice)[1] for choice in choices].count("d0") <= 32


def full(worker_id: str, role: str) -> object:
    report = measured(worker_id, role)
    return replace(report, blocks=replace(report.blocks, free=10, used=9990))


@pytest.mark.parametrize("policy", POLICIES)
def test_full_worker_is_not_chosen_if_another_has_capacity(policy: str) -> None:
    cluster = seen(
        full("p0", "prefill"),
        measured("p1", "prefill", **queued(9999)),
        full("d0", "decode"),
        busy("d1", max_num_seqs=64),
    )
    assert ids(chosen(cluster, policy=policy)) == ("p1", "d1")


@pytest.mark.parametrize("policy", POLICIES)
def test_full_cluster_rejects_first_attempts_but_not_retries(policy: str) -> None:
    no_place = busy("d", 64)
    for cluster in (seen(measured("p", "prefill"), full("d", "decode")), seen(measured("p", "prefill"), no_place)):
        answer = POLICIES[policy](asked(), cluster, context(max_capacity_wait_s=0.0))
        assert isinstance(answer, Rejection)
        assert (answer.reason, answer.term) == (Reason.NO_CAPACITY, "decode_capacity")
        assert ids(chosen(cluster, asked(attempt=1), policy, max_capacity_wait_s=0.0))[1] == "d"
        assert ids(chosen(cluster, asked(), policy))[1] == "d", (
            "requests that cannot wait at the scheduler wait at the worker"
        )


def test_decode_worker_prefills_if_the_prefill_side_is_full() -> None:
    assert ids(chosen(seen(full("p", "prefill"), busy()), max_capacity_wait_s=0.0)) == (None, "d")
    answer = prefix_aware(asked(), seen(full("p", "prefill"), busy()), context(max_capacity_wait_s=0.0))
    assert isinstance(answer, Rejection)
    assert answer.term == "prefill_capacity"


def test_full_decode_worker_is_chosen_if_capacity_is_predicted_soon() -> None:
    """All 64 batch slots are taken. The first of 64 sequences ends in a 64th of a mean answer."""
    crowded = seen(measured("p", "prefill"), busy("d", 64))
    assert isinstance(kv_centric(asked(), crowded, context(max_capacity_wait_s=0.001)), Rejection)
    assert ids(chosen(crowded, max_capacity_wait_s=1.0)) == ("p", "d")
