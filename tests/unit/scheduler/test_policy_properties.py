"""Properties of all policies and of the worker table on random clusters."""

from dataclasses import fields, replace
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from baton.core.cluster.placement import Rejection
from baton.core.ids import DecisionId
from baton.core.request import Slo
from baton.scheduler.policies import POLICIES
from baton.scheduler.policies.kv_centric import kv_centric
from baton.scheduler.policies.policy_types import Choice
from baton.scheduler.state.cluster_state import ClusterState
from baton.scheduler.state.worker_table import KvGroup, WorkerTable, worker_table_of
from tests.builders import worker_ref
from tests.unit.scheduler.measured_workers import fast_link, measured, random_cluster, seen
from tests.unit.scheduler.policy_cases import asked, busy, chosen, context, ids


@given(seed=st.integers(0, 1_000_000), name=st.sampled_from(sorted(POLICIES)), refuse_full=st.booleans())
def test_policies_are_deterministic_and_never_choose_dead_draining_or_full_workers(
    seed: int, name: str, refuse_full: bool
) -> None:
    random = Random(seed)
    cluster = random_cluster(random)
    asking = asked(
        random.choice([1, 15, 16, 100, 500, 2000]),
        slo=Slo(tpot_s=random.choice([None, 0.02])),
        sample_count=random.choice([1, 3]),
    )
    answer = POLICIES[name](asking, cluster, context(seed, max_capacity_wait_s=0.0 if refuse_full else None))
    shuffled = list(cluster.workers)
    random.shuffle(shuffled)
    again = POLICIES[name](
        asking,
        replace(seen(*shuffled), overlaps=cluster.overlaps),
        context(seed, max_capacity_wait_s=0.0 if refuse_full else None),
    )
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
            blocks_needed = -(
                -(asking.num_prompt_tokens + asking.sample_count) // worker.report.layout.block_size_tokens
            )
            assert blocks_needed <= worker.longest_sequence_blocks(worker.num_free_blocks)  # layers may have windows
            assert not decodes or worker.num_seqs + asking.sample_count <= worker.report.max_num_seqs
    if answer.prefill is not None and answer.decode is not None:
        assert answer.prefill.report.layout == answer.decode.report.layout
        assert all(
            link.peer.worker_id != answer.prefill.worker_id or not link.broken for link in answer.decode.report.links
        )
    if answer.prefix_source is not None:
        reader = answer.prefill or answer.decode
        assert reader is not None
        holder = next(w for w in cluster.workers if w.worker == answer.prefix_source.worker)
        assert holder.worker_id != reader.worker_id
        assert answer.prefix_source.num_blocks <= cluster.overlaps[holder.worker_id].num_held_blocks
        assert holder.report.layout == reader.report.layout
    if answer.predicted is not None:
        p = answer.predicted
        assert all(0 <= value < 1e6 for value in (p.queue_s, p.prefix_pull_s, p.prefill_s, p.transfer_s, p.ttft_s))


def groups(table: WorkerTable) -> list[KvGroup]:
    return [table.kv_groups[int(i)] for i in table.reported.kv_group]


@given(seed=st.integers(0, 1_000_000))
def test_an_updated_worker_table_equals_one_rebuilt_from_the_snapshot(seed: int) -> None:
    random = Random(seed)
    view = ClusterState(silence_s=5.0, reservation_s=3.0)
    open_ids: list[DecisionId] = []
    for step in range(random.randrange(30)):
        name = f"w{random.randrange(4)}"
        match random.randrange(5):
            case 0 | 1:
                drawn = random_cluster(random, 5)
                for each in drawn.workers:
                    counted = tuple(random.sample(open_ids, min(len(open_ids), 2)))
                    view.update(replace(each.report, report_seq=step, counted_decision_ids=counted), float(step))
            case 2:
                view.remove(worker_ref(name))
            case 3:
                answer = kv_centric(
                    asked(200, slo=Slo(tpot_s=0.1)), view.snapshot(float(step), seen(w1=9).overlaps), context(step)
                )
                if isinstance(answer, Choice):
                    open_ids.append(DecisionId(str(step)))
                    view.reserve(
                        open_ids[-1],
                        asked(200, slo=Slo(tpot_s=0.1)),
                        answer.placement(open_ids[-1], "s", "x"),
                        float(step),
                    )
            case 4:
                if open_ids:
                    view.release(random.choice(open_ids), ("w0", "w1", "w2", "w3"))
        snapshot = view.snapshot(float(step))
        copy = replace(snapshot)
        assert "worker_table" not in copy.derived
        updated, rebuilt = worker_table_of(snapshot), worker_table_of(copy)
        assert groups(updated) == groups(rebuilt)
        for part in ("reported", "reserved", "derived", "links"):
            for field in fields(getattr(updated, part)):
                if field.name != "kv_group":
                    left, right = (getattr(getattr(table, part), field.name) for table in (updated, rebuilt))
                    assert (left == right).all(), field.name


def test_snapshot_does_not_change_after_later_updates() -> None:
    view = ClusterState(silence_s=1e9, reservation_s=1e9)
    view.update(measured("p", "prefill"), 0.0)
    view.update(busy(links=(fast_link("p"),)), 0.0)
    before = view.snapshot(0.0)
    first = chosen(before)
    view.reserve(DecisionId("1"), asked(), first.placement(DecisionId("1"), "s", "x"), 0.0)
    view.update(busy(report_seq=2, links=(fast_link("p", broken=True),)), 0.0)
    assert chosen(before) == first
    assert ids(chosen(view.snapshot(0.0))) == (None, "d")
