"""Each named array of the worker table holds the field of its name, at the position of its worker."""

from dataclasses import asdict, fields
from itertools import chain

import pytest

from baton.core.cluster.cluster_snapshot import WorkerView
from baton.core.cluster.worker_report import TierReport
from baton.core.step_cost import StepCostModel
from baton.scheduler.state.worker_data import DerivedState, ReportedState, ReservedState
from baton.scheduler.state.worker_row import derived_state
from baton.scheduler.state.worker_table import WorkerTable, WorkerTableBuilder
from tests.builders import blocks, layout
from tests.unit.scheduler.measured_workers import fast_link, measured

COSTS = StepCostModel(
    step_s=0.002,
    prefill_token_s=1e-4,
    prefill_attended_s=2e-9,
    decode_seq_s=5e-4,
    decode_context_s=1e-7,
    prefill_factor=1.1,
    mixed_factor=1.25,
    decode_factor=0.8,
)
LAYOUT = layout(block_size_tokens=16)
VIEW = WorkerView(
    report=measured(
        "w1",
        "hybrid",
        layout=LAYOUT,
        blocks=blocks(total=1000, free=700),
        costs=COSTS,
        running_seqs=7,
        running_context_tokens=2800,
        waiting_seqs=3,
        waiting_prefill_tokens=900,
        waiting_prefill_attended_tokens=500_000,
        max_num_batched_tokens=519,
        max_num_seqs=64,
        target_step_s=0.07,
        ttft_target_factor=8.0,
        tpot_target_factor=2.5,
        mean_output_tokens=123.0,
        recent_prefill_share=0.3,
        evicted_reuse=0.15,
        tokens_per_step=1.7,
        links=(fast_link("w0", bytes_per_s=5e8, exposed_s=0.003),),
        tiers=(
            TierReport(tier="host", total=2000, load_bytes_per_s=16e9, load_overhead_s=0.001, loading_bytes=32 * 10**9),
            TierReport(tier="disk", total=9000, load_bytes_per_s=2e9, load_overhead_s=0.004, loading_bytes=10**9),
        ),
    ),
    reserved_seqs=2,
    reserved_prefill_tokens=150,
    reserved_attended_tokens=11_000,
    reserved_blocks=20,
    reserved_context_tokens=410,
    tpot_slo_s=0.04,
)
REPORTED: dict[str, float] = {
    "kv_group": 1,
    "is_ready": 1,
    "can_prefill": 1,
    "block_size_tokens": 16,
    "total_blocks": 1000,
    "max_prefill_tokens": 16_000,
    "max_decode_tokens": 16_000,
    "decoding_seqs": 7,
    "decoding_context_tokens": 2800,
    "joining_seqs_unknown": 0,
    "max_chunk_tokens": 512,
    "target_step_s": 0.07,
    "max_num_seqs": 64,
    "mean_output_tokens": 123.0,
    "recent_prefill_share": 0.3,
    "evicted_reuse": 0.15,
    "tokens_per_step": 1.7,
    "ttft_factor": 8.0,
    "tpot_factor": 2.5,
    "default_link_s_per_byte": 2e-9,
    "host_reload_s_per_byte": 1 / 16e9,
    "disk_reload_s_per_byte": 1 / 2e9,
    "host_reload_start_s": 2.001,
    "disk_reload_start_s": 0.504,
    "default_link_exposed_s": 0.003,
    "cost_source": 1,
    "mixed_decode_s": 1.25 * (7 * 5e-4 + 2800 * 1e-7),
    "base_step_s": 1.25 * 0.002,
    "prefill_token_s": 1.25e-4,
    "prefill_attended_s": 1.25 * 2e-9,
    "decode_step_s": 0.8 * 0.002,
    "decode_seq_s": 0.8 * 5e-4,
    "decode_context_s": 0.8 * 1e-7,
    "mixed_to_decode_ratio": 1.25 / 0.8,
}
RESERVED: dict[str, float] = {
    "free_blocks": 680,
    "free_tokens": 680 * 16,
    "free_seqs": 64 - 7 - 3 - 2,
    "joining_seqs": 5,
    "joining_context_tokens": 410 + 3 * 400,
    "queued_tokens": 1050,
    "queued_attended_tokens": 511_000,
    "tpot_slo_s": 0.04,
}
DERIVED: dict[str, float] = asdict(derived_state(ReportedState(**REPORTED), ReservedState(**RESERVED)))
OTHER_WORKERS = {
    "kv_group": (0, 0),
    "is_ready": (1, 1),
    "can_prefill": (1, 0),
    "cost_source": (0, 1),
    "max_prefill_tokens": (320_000, 0),
    "max_decode_tokens": (0, 320_000),
}
"""Fields of few values, at the prefill worker without costs and at the decode worker."""
EXPECTED = {"reported": REPORTED, "reserved": RESERVED, "derived": DERIVED}
OTHER_LAYOUT = layout(block_size_tokens=32)
UNMEASURED = WorkerView(report=measured("w0", "prefill", layout=OTHER_LAYOUT, costs=None))
DECODE = WorkerView(report=measured("w2", "decode", layout=OTHER_LAYOUT))


def built() -> WorkerTable:
    builder = WorkerTableBuilder()
    builder.rebuild((UNMEASURED, VIEW, DECODE))
    return builder.table()


def updated() -> WorkerTable:
    """The table after the worker's report and then only its reservations have changed."""
    builder = WorkerTableBuilder()
    builder.rebuild((UNMEASURED, WorkerView(report=measured("w1", "hybrid", layout=LAYOUT)), DECODE))
    builder.update(WorkerView(report=VIEW.report))
    builder.update(VIEW)
    return builder.table()


def test_expected_values_are_distinct_and_name_every_field() -> None:
    """Two fields that swapped their places would otherwise not be seen."""
    for part, state in (("reported", ReportedState), ("reserved", ReservedState), ("derived", DerivedState)):
        assert set(EXPECTED[part]) == {field.name for field in fields(state)}
    values = [
        value for name, value in chain(*(part.items() for part in EXPECTED.values())) if name not in OTHER_WORKERS
    ]
    assert len(set(values)) == len(values)
    columns = [(REPORTED[name], *others) for name, others in OTHER_WORKERS.items()]
    assert len(set(columns)) == len(columns)


@pytest.mark.parametrize("table", [built(), updated()], ids=["built", "updated"])
@pytest.mark.parametrize("part", EXPECTED)
def test_named_array_holds_the_field_of_its_name(table: WorkerTable, part: str) -> None:
    arrays, row = getattr(table, part), getattr(table.row(1), part)
    for name, value in EXPECTED[part].items():
        assert getattr(arrays, name)[1] == pytest.approx(value, rel=1e-12), name
        assert getattr(row, name) == pytest.approx(value, rel=1e-12), name


@pytest.mark.parametrize("table", [built(), updated()], ids=["built", "updated"])
def test_other_workers_keep_their_own_values(table: WorkerTable) -> None:
    assert {name: tuple(getattr(table.reported, name)[[0, 2]]) for name in OTHER_WORKERS} == OTHER_WORKERS
