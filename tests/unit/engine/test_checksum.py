"""Checksums that stand for KV: single and vectorized computation, and detection of wrong slots."""

from random import Random

import numpy as np
import pytest

from baton.core.kv.block_hash import TokenIds, token_ids
from baton.engine.kv_cache.checksum import START, extend, slots_of, token_after, wrong_slot


def tokens(number: int, seed: int = 0) -> TokenIds:
    rng = Random(seed)
    return token_ids(rng.randrange(2**32) for _ in range(number))


@pytest.mark.parametrize("number", [1, 2, 3, 16, 17, 5000])
def test_vectorized_checksums_equal_single_ones(number: int) -> None:
    ids = tokens(number)
    expected, content = [], START
    for token_id in ids:
        content = extend(content, token_id)
        expected.append(content)
    assert slots_of(ids).tolist() == expected
    cut = number // 2
    assert slots_of(ids[cut:], expected[cut - 1] if cut else START).tolist() == expected[cut:]


def test_checksum_depends_on_every_token_of_the_prefix() -> None:
    ids = tokens(50)
    whole = slots_of(ids)
    for changed in (0, 20, 49):
        other = token_ids(ids)
        other[changed] ^= 1
        assert (slots_of(other) == whole).tolist() == [True] * changed + [False] * (50 - changed)
    swapped = token_ids((*ids[:20], ids[21], ids[20], *ids[22:]))
    assert not (slots_of(swapped)[21:] == whole[21:]).any()


def test_token_array_can_still_grow() -> None:
    ids = tokens(3)
    slots_of(ids)
    ids.append(1)
    assert len(ids) == 4


def test_first_wrong_slot_is_found_in_any_row() -> None:
    ids = tokens(40)
    whole = slots_of(ids)
    rows = whole[10:40].reshape(3, 10)
    before = [int(whole[9]), int(whole[19]), int(whole[29])]
    assert wrong_slot(whole[None], ids, [START]) is None
    assert wrong_slot(rows, ids[10:40], before) is None
    assert wrong_slot(rows, ids[10:40], [before[0], START, before[2]]) == (1, 0)
    for row, index in ((0, 0), (1, 9), (2, 4)):
        torn = rows.copy()
        torn[row, index] ^= np.uint64(1 << 63)
        assert wrong_slot(torn, ids[10:40], before) == (row, index)
    assert wrong_slot(whole[None], tokens(40, seed=1), [START]) == (0, 0)


def test_next_token_depends_on_prefix_and_sampling_key() -> None:
    base = token_after(START, 1, 2, 3, 1 << 30)
    others = [
        token_after(START + 1, 1, 2, 3, 1 << 30),
        token_after(START, 2, 2, 3, 1 << 30),
        token_after(START, 1, 3, 3, 1 << 30),
    ]
    assert len({base, *others, token_after(START, 1, 2, 4, 1 << 30)}) == 5
    drawn = [token_after(int(slot), 0, 0, 0, 10) for slot in slots_of(tokens(5000))]
    assert min(drawn.count(token) for token in range(10)) > 400, "all tokens of the vocabulary are about equally likely"
