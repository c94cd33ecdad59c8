"""A decision record says why blocks of the prompt were not in the cache."""

import tracemalloc
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from baton.core.cluster.cluster_snapshot import ClusterSnapshot, WorkerView
from baton.core.cluster.decision_record import MissingPrefix, MissingReason
from baton.core.cluster.placement import Placement, PlacementQuery
from baton.core.kv.block_hash import prefix_key, token_ids
from baton.core.messages.jobs import PrefixSource
from baton.prefix_index.eviction_record import EvictionRecord
from baton.prefix_index.index import PrefixOverlap
from baton.rpc.mappers.scheduler_mapper import from_decision_record, to_decision_record
from baton.scheduler.decisions.decide import DecisionRules
from baton.scheduler.decisions.decision_records import UnrecordedDecision
from baton.scheduler.decisions.missing_prefixes import MissingPrefixes, SeenBeginnings
from tests.builders import hashes_of, placement, query, worker_ref
from tests.unit.scheduler.measured_workers import measured

TOKENS = range(100, 100 + 16 * 20 + 5)
CHAIN = hashes_of(TOKENS, 16)  # 20 blocks


def asked(tokens: Any = TOKENS, *, salt: str = "", **changes: Any) -> PlacementQuery:
    """A query for a prompt. `salt` stands for all that changes its hashes."""
    hashes = tuple(
        bytes(a ^ b for a, b in zip(h, salt.encode().ljust(16, b"\0"), strict=True)) for h in hashes_of(tokens, 16)
    )
    return query(
        num_prompt_tokens=len(tokens), block_hashes=hashes, prefix_key=prefix_key(token_ids(tokens), 16), **changes
    )


def decided(
    asking: PlacementQuery, overlaps: dict[str, PrefixOverlap] | None = None, **placed: Any
) -> UnrecordedDecision:
    views = [WorkerView(report=measured(name, "prefill")) for name in ("w0", "w2")]
    views.insert(1, WorkerView(report=measured("w1", "decode")))
    answer = placement("w0", "w1", **placed)
    return UnrecordedDecision(
        decision_id=answer.decision_id,
        scheduler_id="s",
        policy="kv_centric",
        query=asking,
        answer=answer,
        choice=None,
        cluster=ClusterSnapshot(workers=tuple(views), overlaps=overlaps or {}),
        rules=DecisionRules(decision_number=0),
    )


def held(num_blocks: int, on_device: int | None = None) -> PrefixOverlap:
    on_device = num_blocks if on_device is None else on_device
    return PrefixOverlap(num_blocks=num_blocks, num_held_blocks=num_blocks, num_device_blocks=on_device)


def explained(decision: UnrecordedDecision, evictions: EvictionRecord | None = None) -> MissingPrefix | None:
    return MissingPrefixes(evictions or EvictionRecord()).explain(decision, 10.0)


def test_prompt_of_which_nothing_is_known_was_never_seen() -> None:
    assert explained(decided(asked())) == MissingPrefix(num_blocks=20, reason=MissingReason.NEVER_SEEN)


def test_nothing_is_missing_if_all_full_blocks_are_reused() -> None:
    assert explained(decided(asked(), prefill_overlap_blocks=20)) is None
    source = PrefixSource(worker=worker_ref("w2"), num_blocks=20)
    assert explained(decided(asked(), prefix_source=source)) is None
    aligned = decided(asked(range(100, 100 + 16 * 20)), prefill_overlap_blocks=19)
    assert explained(aligned) is None, "the last token is always computed"


def test_blocks_that_another_worker_holds_were_not_worth_pulling() -> None:
    decision = decided(asked(), {"w0": held(4), "w2": held(12)}, prefill_overlap_blocks=4)
    assert explained(decision) == MissingPrefix(
        num_blocks=16, reason=MissingReason.HELD_ELSEWHERE, worker_id="w2", known_blocks=8
    )


def test_blocks_in_a_slower_tier_are_demoted() -> None:
    decision = decided(asked(), {"w2": held(12, on_device=0)})
    assert explained(decision) == MissingPrefix(
        num_blocks=20, reason=MissingReason.DEMOTED, worker_id="w2", known_blocks=12
    )
    of_chosen = decided(asked(), {"w0": held(12, on_device=3)}, prefill_overlap_blocks=3)
    assert explained(of_chosen) == MissingPrefix(
        num_blocks=17, reason=MissingReason.DEMOTED, worker_id="w0", known_blocks=9
    )


def test_evicted_blocks_name_the_worker_and_the_time() -> None:
    evictions = EvictionRecord()
    evictions.add("w2", (CHAIN[7], CHAIN[15]), 4.0)
    evictions.add("w0", (CHAIN[3],), 5.0)
    decision = decided(asked(), prefill_overlap_blocks=4)
    assert explained(decision, evictions) == MissingPrefix(
        num_blocks=16, reason=MissingReason.EVICTED, worker_id="w2", known_blocks=12, ago_s=6.0
    )
    assert explained(decided(asked(), {"w0": held(18)}, prefill_overlap_blocks=18), evictions) == MissingPrefix(
        num_blocks=2, reason=MissingReason.NEVER_SEEN
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tenant": "other"}, MissingReason.OTHER_TENANT),
        ({"model": "other"}, MissingReason.OTHER_MODEL),
        ({"tenant": "other", "model": "other"}, MissingReason.OTHER_TENANT),
        ({}, MissingReason.OTHER_SALT),
    ],
)
def test_equal_tokens_with_another_root_are_named(changes: dict[str, str], reason: MissingReason) -> None:
    missing = MissingPrefixes(EvictionRecord())
    missing.explain(decided(asked(salt="a", **changes)), 0.0)
    found = missing.explain(decided(asked(salt="b")), 1.0)
    assert found == MissingPrefix(num_blocks=20, reason=reason)
    again = missing.explain(decided(asked(salt="b"), prefill_overlap_blocks=3), 2.0)
    assert again == MissingPrefix(num_blocks=17, reason=MissingReason.NEVER_SEEN), "some of it is cached"


def test_other_first_tokens_are_no_relation() -> None:
    missing = MissingPrefixes(EvictionRecord())
    missing.explain(decided(asked(range(900, 1200), salt="a", tenant="other")), 0.0)
    found = missing.explain(decided(asked(salt="b")), 1.0)
    assert found is not None
    assert found.reason is MissingReason.NEVER_SEEN


def test_rejections_and_prompts_without_hashes_are_not_explained() -> None:
    assert explained(replace(decided(asked()), cluster=None)) is None
    assert explained(decided(query())) is None


def test_beginnings_are_bounded_in_bytes() -> None:
    rng, limit = Random(1), 200_000

    def another(number: int) -> PlacementQuery:
        return query(prefix_key=rng.randbytes(16), block_hashes=(rng.randbytes(16),), tenant=f"{number:0100}")

    seen = SeenBeginnings(limit)
    for number in range(400):  # fills its tables
        seen.add(another(number))
    tracemalloc.start()
    for number in range(1000):
        seen.add(another(number))
        assert seen.num_bytes <= limit
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert 0.5 * limit < used < limit
    same = another(0)
    for number in range(20):
        seen.add(replace(same, block_hashes=(bytes([number]) * 16,)))
    assert len(seen._roots[same.prefix_key]) == 4
    assert seen.other_root(replace(same, block_hashes=(bytes(16),))) is MissingReason.OTHER_SALT


def test_record_keeps_the_reason_and_no_hash_of_the_prompt() -> None:
    missing = MissingPrefix(num_blocks=3, reason=MissingReason.EVICTED, worker_id="w2", known_blocks=1, ago_s=0.5)
    record = replace(decided(asked()), missing=missing).to_record()
    assert (record.missing, record.query.prefix_key, record.query.block_hashes) == (missing, b"", ())
    assert from_decision_record(to_decision_record(record)) == record
    assert isinstance(record.placement, Placement)


def test_prefix_key_covers_the_first_eight_blocks() -> None:
    tokens = token_ids(range(200))
    assert prefix_key(tokens, 16) == prefix_key(tokens[:128], 16) == prefix_key(tokens[:128] + token_ids((7,) * 99), 16)
    assert prefix_key(tokens, 16) != prefix_key(token_ids((9,)) + tokens[1:], 16)
    assert prefix_key(tokens[:40], 16) == prefix_key(tokens[:32], 16) != prefix_key(tokens, 16)
    assert prefix_key(tokens[:15], 16) == b""
