"""Eligibility: each exclusion alone, and the masks against the scalar functions on random clusters."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.cluster.cluster_snapshot import ClusterSnapshot, WorkerView
from baton.core.cluster.placement import PlacementQuery
from baton.core.cluster.worker_report import WorkerRole, WorkerState
from baton.core.kv.block_hash import HASH_SCHEME
from baton.core.kv.kv_layout import KvLayout
from baton.scheduler.policies.eligibility import (
    Exclusion,
    Side,
    eligibility_masks,
    ineligible,
    readable_mask,
    readable_workers,
    readers_of,
    sources_of,
)
from baton.scheduler.state.worker_table import worker_table_of
from tests.builders import blocks, query, worker_ref, worker_report
from tests.unit.scheduler.measured_workers import ALL_WINDOWED, LAYOUT, WINDOWED, decoding, measured, random_cluster

SIDES: tuple[Side, ...] = ("prefill", "decode")


def random_query(random: Random, workers: tuple[WorkerView, ...]) -> PlacementQuery:
    return query(
        num_prompt_tokens=random.choice([1, 15, 16, 100, 700, 799, 800, 15_999]),
        sample_count=random.choice([1, 1, 3]),
        model=random.choice(["demo", "demo", "other"]),
        hash_scheme=random.choice(["", "", HASH_SCHEME, "unknown"]),
        model_fingerprint=random.choice(["", "", "model-a", "model-b"]),
        avoid=tuple(
            replace(view.worker, worker_epoch=random.choice([1, 1, 2])) for view in workers if random.random() < 0.2
        ),
    )


@given(seed=st.integers(0, 1_000_000))
def test_masks_equal_the_scalar_function_on_random_clusters(seed: int) -> None:
    random = Random(seed)
    cluster = random_cluster(random, most=24)
    asked = random_query(random, cluster.workers)
    for side in SIDES:
        masks = eligibility_masks(asked, worker_table_of(cluster), side)
        exclusions = [ineligible(worker, asked, side) for worker in cluster.workers]
        assert masks.eligible.tolist() == [why is None for why in exclusions]
        assert masks.not_avoided.tolist() == [why in (None, Exclusion.NO_FREE_CAPACITY) for why in exclusions]
        assert masks.usable.tolist() == [why is None or why.is_soft for why in exclusions]


@pytest.mark.parametrize(
    ("layout", "role", "chunk", "most"),
    [
        (LAYOUT, WorkerRole.HYBRID, 64, 100 * 16),
        (WINDOWED, WorkerRole.HYBRID, 64, (100 - 2 * 11) * 16),
        (WINDOWED, WorkerRole.DECODE, 64, (100 - 2 * 7) * 16),
        (WINDOWED, WorkerRole.HYBRID, 0, 100 // 3 * 16),
    ],
)
def test_layers_with_a_window_take_a_constant_number_of_blocks(
    layout: KvLayout, role: WorkerRole, chunk: int, most: int
) -> None:
    """A window of 96 tokens needs blocks for window and chunk.

    The chunk has 64 tokens, one where prompts are pulled only, or an unknown size: perhaps the whole prompt.
    """
    report = worker_report(layout=layout, role=role, blocks=blocks(100), max_num_batched_tokens=chunk)
    worker = WorkerView(report=report)
    for num_tokens, why in ((most - 1, None), (most, Exclusion.TOO_SMALL)):
        asked = query(num_prompt_tokens=num_tokens, sample_count=1)
        assert ineligible(worker, asked, "decode") is why
        masks = eligibility_masks(asked, worker_table_of(ClusterSnapshot(workers=(worker,))), "decode")
        assert masks.eligible.tolist() == [why is None]


@pytest.mark.parametrize(("num_free", "why"), [(11, None), (10, Exclusion.NO_FREE_CAPACITY)])
def test_worker_takes_prompts_of_any_length_if_all_layers_have_a_window(num_free: int, why: Exclusion | None) -> None:
    """Window and chunk need 11 blocks at once. All 100 blocks hold only 1,600 tokens."""
    counts = blocks(100, free=num_free, used=100 - num_free)
    report = worker_report(layout=ALL_WINDOWED, blocks=counts, max_num_batched_tokens=64, max_model_len=32_768)
    worker, asked = WorkerView(report=report), query(num_prompt_tokens=32_000)
    for side in SIDES:
        assert ineligible(worker, asked, side) is why
        masks = eligibility_masks(asked, worker_table_of(ClusterSnapshot(workers=(worker,))), side)
        assert (masks.usable.tolist(), masks.eligible.tolist()) == ([True], [why is None])


@given(seed=st.integers(0, 1_000_000))
def test_readable_mask_equals_the_scalar_function_on_random_clusters(seed: int) -> None:
    random = Random(seed)
    cluster = random_cluster(random, most=24)
    table, prefill = worker_table_of(cluster), eligibility_masks(query(), worker_table_of(cluster), "prefill").usable
    candidates = [worker for worker, is_candidate in zip(cluster.workers, prefill, strict=True) if is_candidate]
    for i, decode in enumerate(cluster.workers):
        readable = readable_mask(table, prefill, i)
        assert [w for w, yes in zip(cluster.workers, readable, strict=True) if yes] == readable_workers(
            candidates, decode
        )


@given(seed=st.integers(0, 1_000_000))
def test_sources_and_readers_equal_the_scalar_function_for_each_pair(seed: int) -> None:
    cluster = random_cluster(Random(seed), most=12)
    table, workers = worker_table_of(cluster), cluster.workers
    for i, worker in enumerate(workers):
        assert sources_of(table, i).tolist() == [bool(readable_workers([source], worker)) for source in workers]
        assert readers_of(table, i).tolist() == [bool(readable_workers([worker], reader)) for reader in workers]


@pytest.mark.parametrize(
    ("changes", "asked", "expected"),
    [
        ({}, {}, None),
        ({"state": WorkerState.STARTING}, {}, Exclusion.STARTING),
        ({"state": WorkerState.DRAINING}, {}, Exclusion.DRAINING),
        ({"state": WorkerState.UNHEALTHY}, {}, Exclusion.UNHEALTHY),
        ({"model": "other"}, {}, Exclusion.OTHER_MODEL),
        ({}, {"model_fingerprint": "model-b"}, Exclusion.OTHER_WEIGHTS),
        ({"blocks": blocks(total=2)}, {"num_prompt_tokens": 32}, Exclusion.TOO_SMALL),
        ({"blocks": blocks(total=2)}, {"num_prompt_tokens": 31}, None),
        ({}, {"hash_scheme": "unknown"}, Exclusion.OTHER_HASH_SCHEME),
        ({}, {"avoid": (worker_ref("w"),)}, Exclusion.FAILED_BEFORE),
        ({}, {"avoid": (worker_ref("w", epoch=2),)}, None),
        ({"blocks": blocks(total=9, used=8)}, {"num_prompt_tokens": 16}, Exclusion.NO_FREE_CAPACITY),
        ({"max_num_seqs": 4, **decoding(3)}, {"sample_count": 2}, Exclusion.NO_FREE_CAPACITY),
    ],
)
def test_each_exclusion_on_its_own(
    changes: dict[str, object], asked: dict[str, object], expected: Exclusion | None
) -> None:
    worker = WorkerView(report=measured("w", "hybrid", layout=LAYOUT, **changes))
    assert ineligible(worker, query(**asked), "decode") is expected


def test_roles_exclude_and_batch_slots_count_only_for_decode() -> None:
    prefill, decode = (WorkerView(report=measured(role, role)) for role in ("prefill", "decode"))
    assert ineligible(decode, query(), "prefill") is Exclusion.OTHER_ROLE
    assert ineligible(prefill, query(), "decode") is Exclusion.OTHER_ROLE
    full = WorkerView(report=measured("h", "hybrid", max_num_seqs=3, **decoding(3)))
    assert ineligible(full, query(), "prefill") is None
    assert ineligible(full, query(), "decode") is Exclusion.NO_FREE_CAPACITY
