"""Builds reports of workers with step costs, and random clusters of them."""

from random import Random
from typing import Any

from baton.core.cluster.cluster_snapshot import ClusterSnapshot, WorkerView
from baton.core.cluster.worker_report import LinkReport, TierReport, WorkerReport, WorkerState
from baton.core.step_cost import StepCostModel
from baton.scheduler.decisions.decision_records import RecordedOverlap
from tests.builders import blocks, layout, windowed_layout, worker_ref, worker_report

COSTS = StepCostModel(
    step_s=2e-3, prefill_token_s=1e-4, prefill_attended_s=2e-9, decode_seq_s=5e-4, decode_context_s=1e-7
)
LAYOUT = layout(block_size_tokens=16)
WINDOWED = windowed_layout((0, 96, 96), block_size_tokens=16)
ALL_WINDOWED = windowed_layout((96, 96), block_size_tokens=16)


def measured(worker_id: str, role: str, **changes: Any) -> WorkerReport:
    """An idle worker with 10,000 blocks of 16 tokens, 64 batch slots and a mean answer of 100 tokens."""
    fields: dict[str, Any] = {
        "layout": LAYOUT,
        "blocks": blocks(total=10_000),
        "max_num_seqs": 64,
        "max_model_len": 100_000,
        "max_num_batched_tokens": 512,
        "mean_output_tokens": 100.0,
        "costs": COSTS,
        "ttft_target_factor": 10.0,
        "tpot_target_factor": 3.0,
    }
    return worker_report(worker_id, role, **(fields | changes))


def decoding(seqs: int, context: int = 500) -> dict[str, int]:
    return {"running_seqs": seqs, "running_context_tokens": seqs * context}


def queued(num_tokens: int, seqs: int = 1) -> dict[str, int]:
    return {"waiting_prefill_tokens": num_tokens, "waiting_seqs": seqs}


def fast_link(
    peer: str,
    *,
    epoch: int = 1,
    bytes_per_s: float = 1e9,
    inflight_bytes: int = 0,
    broken: bool = False,
    **costs: float,
) -> LinkReport:
    return LinkReport(
        peer=worker_ref(peer, epoch), bytes_per_s=bytes_per_s, inflight_bytes=inflight_bytes, broken=broken, **costs
    )


def seen(*workers: WorkerReport | WorkerView, **overlaps: int | tuple[int, ...]) -> ClusterSnapshot:
    """A snapshot. `overlaps`: blocks of the prompt that each worker holds, or the fields of its
    `RecordedOverlap`."""
    views = [w if isinstance(w, WorkerView) else WorkerView(report=w) for w in workers]
    known = {name: RecordedOverlap(*(n if isinstance(n, tuple) else (n, n))) for name, n in overlaps.items()}
    return ClusterSnapshot(workers=tuple(sorted(views, key=lambda w: w.worker_id)), overlaps=known)


def random_view(random: Random, name: str, names: list[str]) -> WorkerView:
    """A worker in any state, mostly ready; some are full, unmeasured, or have broken links."""
    role = random.choice(["prefill", "decode", "hybrid"])
    peers = random.sample(names, random.randrange(len(names) + 1))
    report = measured(
        name,
        role,
        state=random.choice([WorkerState.READY] * 6 + list(WorkerState)),
        model=random.choice(["demo"] * 8 + ["other"]),
        layout=random.choice([LAYOUT] * 5 + [WINDOWED, ALL_WINDOWED, layout(block_size_tokens=32)]),
        blocks=blocks(total=random.choice([50, 1000]), used=random.randrange(50), cached=0),
        max_num_seqs=random.choice([4, 16]),
        **decoding(random.randrange(8), random.randrange(1, 900)),
        **queued(random.choice([0, random.randrange(9000)]), random.randrange(5)),
        links=tuple(
            fast_link(
                peer,
                epoch=random.choice([1, 1, 1, 2]),
                bytes_per_s=random.choice([0.0, 1e6, 1e8, 5e9, float("nan")]),
                inflight_bytes=random.choice([0, 0, 10**7]),
                broken=random.random() < 0.1,
                pull_s=random.choice([0.0, 0.001, 0.2]),
                exposed_s=random.choice([0.0, 0.002]),
                dial_s=random.choice([0.0, 0.05]),
            )
            for peer in peers
        ),
        costs=random.choice([COSTS] * 12 + [None]),
        mean_output_tokens=random.choice([0.0, 50.0, 400.0]),
        recent_prefill_share=random.choice([0.0, 0.0, 0.4, 1.0]),
        evicted_reuse=random.choice([0.0, 0.0, 0.2, 1.0]),
        tokens_per_step=random.choice([0.0, 0.0, 1.0, 1.8, 99.0]),
        tiers=tuple(
            TierReport(tier=tier, total=999, load_bytes_per_s=random.choice([0.0, 1e6, 1e10]), load_overhead_s=0.001)
            for tier in ("host", "disk")
            if random.random() < 0.7
        ),
    )
    return WorkerView(
        report=report,
        reserved_seqs=random.choice([0, 0, 2]),
        reserved_prefill_tokens=random.choice([0, 0, 500]),
        reserved_blocks=random.choice([0, 0, 20]),
        reserved_context_tokens=random.choice([0, 0, 900]),
        reserved_link_bytes={peer: random.randrange(10**7) for peer in peers[:1]},
        tpot_slo_s=random.choice([None, None, 0.01, 0.1]),
    )


def random_cluster(random: Random, most: int = 9) -> ClusterSnapshot:
    names = [f"w{i}" for i in range(random.randrange(most))]
    overlaps = {name: _random_overlap(random) for name in names if random.random() < 0.5}
    return seen(*(random_view(random, name, names) for name in names), **overlaps)


def _random_overlap(random: Random) -> tuple[int, ...]:
    """Return blocks that a worker holds or soon will, holds, must reload, and must reload from its disk."""
    counts = [random.randrange(60)]
    for _ in range(3):
        counts.append(random.randrange(counts[-1] + 1))
    return tuple(counts)
