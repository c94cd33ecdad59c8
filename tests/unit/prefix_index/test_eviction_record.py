"""The record of evictions: bounded, and the last eviction of a block counts."""

import tracemalloc
from random import Random

from baton.prefix_index.eviction_record import EVICTION_BYTES, Eviction, EvictionRecord
from tests.builders import hashes_of

CHAIN = hashes_of(range(40))  # 10 blocks


def test_last_evicted_block_of_a_chain_is_found() -> None:
    record = EvictionRecord()
    record.add("w0", CHAIN[2:5], 1.0)
    record.add("w1", CHAIN[4:5], 2.0)
    assert record.last_of(CHAIN) == (4, Eviction("w1", 2.0))
    assert record.last_of(CHAIN[:4]) == (3, Eviction("w0", 1.0))
    assert record.last_of(CHAIN[5:]) is None
    assert record.last_of(()) is None


def test_oldest_evictions_are_forgotten_beyond_the_bytes() -> None:
    record = EvictionRecord(max_bytes=3 * EVICTION_BYTES)
    record.add("w0", CHAIN[:3], 1.0)
    record.add("w0", CHAIN[:1], 2.0)  # evicted again, so it is the newest
    record.add("w0", CHAIN[3:4], 3.0)
    assert len(record) == 3
    assert [record.last_of((block,)) is not None for block in CHAIN[:4]] == [True, False, True, True]
    record.add("w0", CHAIN, 4.0)
    assert len(record) == 3


def test_record_takes_no_more_than_its_bytes() -> None:
    rng, limit = Random(1), 2**19
    tracemalloc.start()
    record = EvictionRecord(limit)
    for number in range(100):
        record.add(f"w{number}", [rng.randbytes(16) for _ in range(64)], float(number))
        assert tracemalloc.get_traced_memory()[0] < limit
    assert tracemalloc.get_traced_memory()[0] > limit / 2
    tracemalloc.stop()
