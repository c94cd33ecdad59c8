"""What each drafter guesses, and that its memory is bounded."""

from itertools import count
from random import Random

import numpy as np
import pytest

from baton.core.kv.block_hash import token_ids
from baton.engine.speculation import ngram_drafter, suffix_drafter
from baton.engine.speculation.drafter import MAX_DRAFT_TOKENS, Draft
from baton.engine.speculation.forced_drafter import ForcedDrafter
from baton.engine.speculation.ngram_drafter import MAX_INDEX_SLOTS, NGRAM_TOKENS, NgramDrafter, NgramIndex
from baton.engine.speculation.suffix_drafter import (
    FIRST_BITS,
    MAX_BITS,
    MAX_BYTES,
    MAX_TABLES,
    MAX_WAITING,
    RECENT_TOKENS,
    SLOT_BYTES,
    SuffixDrafter,
    SuffixTable,
)
from baton.engine.speculation.token_hash import hash_of, hashes_of

TENANT, OTHER = b"a" * 16, b"b" * 16
KEYS = count(1000)


def drafted(drafter: NgramDrafter | SuffixDrafter, tokens: list[int], tenant: bytes = TENANT) -> tuple[int, ...]:
    """Return the draft after tokens that are observed at once."""
    drafter.observe(1, token_ids(tokens), len(tokens), tenant)
    draft = drafter.draft(1, token_ids(tokens), tenant)
    return () if draft is None else draft.tokens


@pytest.mark.parametrize("length", [3, 4])
def test_hashes_of_many_equal_those_of_each(length: int) -> None:
    tokens = [Random(1).randrange(2**32) for _ in range(50)]
    found = hashes_of(np.array(tokens, dtype=np.uint64), length).tolist()
    assert found == [hash_of(tokens[i : i + length]) for i in range(50 - length + 1)]


def test_ngrams_continue_as_after_the_last_occurrence() -> None:
    tokens = [1, 2, 3, 40, 41, 9, 1, 2, 3, 50, 51, 52, 9, 1, 2, 3]
    assert drafted(NgramDrafter(), tokens)[:4] == (50, 51, 52, 9)


def test_repeated_text_continues_its_period() -> None:
    assert drafted(NgramDrafter(), [9, 5, 6, 7, 8, 5, 6, 7, 8]) == tuple([5, 6, 7, 8] * 4)[:MAX_DRAFT_TOKENS]
    assert drafted(NgramDrafter(), [4, 4, 4, 4]) == (4,) * MAX_DRAFT_TOKENS


def test_copy_goes_on_where_it_was_although_a_newer_text_begins_alike() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 90, 5, 6, 7, 91, 92, 93]
    drafter = NgramDrafter()
    assert drafted(drafter, [*text, 1, 2, 3])[:3] == (4, 5, 6)
    assert drafted(drafter, [*text, 1, 2, 3, 4, 5, 6, 7])[:2] == (8, 9)
    assert drafted(drafter, [*text, 1, 2, 3, 4, 5, 6, 7, 50, 5, 6, 7])[:2] == (50, 5), "the newest, once it has ended"


@pytest.mark.parametrize("tokens", [[], [1], [1, 2, 3], [1, 2, 3, 4, 5, 6, 7]])
def test_new_text_has_no_ngram_draft(tokens: list[int]) -> None:
    assert drafted(NgramDrafter(), tokens) == ()


def test_longer_matches_are_stronger() -> None:
    def strength(length: int) -> int:
        text = list(range(100, 100 + length))
        drafter, tokens = NgramDrafter(), token_ids([1, *text, 7, 7, 2, *text])
        drafter.observe(1, tokens, len(tokens), TENANT)
        draft = drafter.draft(1, tokens, TENANT)
        assert draft is not None
        return draft.strength

    assert [strength(length) for length in (3, 4, 8, 16, 40)] == [0, 1, 2, 3, 3]


@pytest.mark.parametrize("seed", range(3))
def test_index_finds_the_last_occurrence_however_it_grows(seed: int) -> None:
    rng = Random(seed)
    text = token_ids(rng.randrange(12) for _ in range(800))
    index, end = NgramIndex(text[: rng.randrange(10)]), 0
    while end < len(text):
        end = min(len(text), end + rng.choice((1, 1, 2, 7, 33, 60)))
        index.extend(text[:end])
        last = text[max(0, end - NGRAM_TOKENS) : end]
        places = [p for p in range(NGRAM_TOKENS, end) if text[p - NGRAM_TOKENS : p] == last]
        found = index.find(text[:end])
        assert found in ((None, places[-1]) if places else (None,))  # another n-gram may have its slot
    assert sum(NgramIndex(text[:n]).find(text[:n]) is not None for n in range(600, 700)) > 15


def test_index_of_a_long_text_is_bounded() -> None:
    text = token_ids(range(200_000))
    index = NgramIndex(text)
    assert index.num_bytes == 4 * MAX_INDEX_SLOTS
    index.extend(text + token_ids(range(10)))
    assert index.find(text + token_ids(range(10))) is None or index.num_bytes == 4 * MAX_INDEX_SLOTS


def test_indexes_of_all_sequences_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram_drafter, "MAX_BYTES", 3 * 4096 + 100)
    drafter, text = NgramDrafter(), token_ids([1, 2, 3, 4, 1, 2, 3] * 60)
    for key in range(5):
        drafter.observe(key, text[:14], 14, TENANT)
    assert len(drafter) == 3
    drafter.observe(0, text, 406, TENANT)  # too long for its index, which may not grow
    assert drafter.num_bytes == 3 * 4096
    assert drafter.draft(0, text, TENANT) is not None
    assert drafter.draft(4, text[:14], TENANT) is None
    drafter.forget(1)
    drafter.forget(2)
    for key in (3, 4):
        drafter.observe(key, text[:14], 1, TENANT)
    assert drafter.draft(4, text[:14], TENANT) is not None
    drafter.observe(0, text, 1, TENANT)
    assert drafter.num_bytes == sum(drafter._indexes[key].num_bytes for key in (0, 3, 4)) == 3 * 4096
    drafter.forget(3)
    drafter.observe(0, text, 1, TENANT)
    assert drafter.num_bytes == 3 * 4096, "it has grown"


def test_drafters_forget_ended_sequences() -> None:
    ngrams, forced = NgramDrafter(), ForcedDrafter()
    drafted(ngrams, [1, 2, 3, 4])
    forced.offer(1, 0, (5, 6))
    for drafter in (ngrams, forced):
        drafter.forget(1)
        drafter.forget(99)
        assert len(drafter) == 0


def learned(*responses: list[int], tenant: bytes = TENANT) -> SuffixDrafter:
    """Return a drafter that has observed responses of a tenant whose first response has ended."""
    drafter = SuffixDrafter()
    observe_responses(drafter, tenant, [90, 91, 92, 93, 94], *responses)
    return drafter


def observe_responses(drafter: SuffixDrafter, tenant: bytes, *responses: list[int]) -> None:
    """Observe responses one after the other. The first token of each is its prompt."""
    for response in responses:
        drafter.observe(next(KEYS), token_ids(response), len(response) - 1, tenant)


def test_suffixes_of_other_responses_of_the_tenant_are_used() -> None:
    drafter = learned([1, 2, 3, 4, 5, 6, 7, 8])
    assert drafted(drafter, [20, 1, 2, 3, 4]) == (5, 6, 7, 8)
    assert drafted(drafter, [20, 1, 2, 3, 4], OTHER) == (), "of another tenant"
    assert drafted(drafter, [3, 4, 9, 9, 9]) == ()


def test_prompts_are_not_learned() -> None:
    drafter = learned()
    drafter.observe(7, token_ids([1, 2, 3, 4, 5, 6, 7, 8]), 1, TENANT)
    assert drafted(drafter, [20, 1, 2, 3, 4]) == ()


def test_most_frequent_continuation_wins() -> None:
    drafter = learned(*([1, 2, 3, 4, token] for token in (5, 6, 6, 5, 6, 6)))
    drafter.observe(1, token_ids([1, 2, 3, 4]), 0, TENANT)
    assert drafter.draft(1, token_ids([1, 2, 3, 4]), TENANT) == Draft((6,), 1)


def salt(number: int) -> bytes:
    return b"%16d" % number


def test_salts_of_one_response_get_no_memory() -> None:
    drafter = SuffixDrafter()
    for number in range(3 * MAX_WAITING):
        for _ in range(20):  # the steps of one sequence
            drafter.observe(number, token_ids(range(9)), 1, salt(number))
    assert drafter.num_bytes == len(drafter) == 0
    assert len(drafter._waiting) == MAX_WAITING


def test_tables_are_kept_while_a_client_sends_new_salts_all_the_time() -> None:
    """Also if it uses each salt twice."""
    text = list(range(100, 150))
    drafter = SuffixDrafter()
    for number in range(20):
        observe_responses(drafter, salt(number), *[text] * 3)
    for number in range(100, 2_000):
        observe_responses(drafter, salt(number), text[:9], text[:9])
        assert drafter.num_bytes <= MAX_BYTES
        assert len(drafter) <= MAX_TABLES
    assert [drafted(drafter, text[:10], salt(number))[:3] for number in range(20)] == [(110, 111, 112)] * 20


def test_tables_grow_and_keep_what_they_have_learned() -> None:
    rng = Random(1)
    responses = [[rng.randrange(10**6) for _ in range(60)] for _ in range(200)]
    drafter = learned(*responses)
    assert drafter.num_bytes == SLOT_BYTES << MAX_BITS
    guesses = [drafted(drafter, response[:8])[:1] == (response[8],) for response in responses]
    assert sum(guesses) > 0.6 * len(guesses)


def test_memory_is_bounded_and_goes_to_those_with_far_more_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix_drafter, "MAX_BYTES", 8 * SLOT_BYTES << FIRST_BITS)
    drafter, text = SuffixDrafter(), list(range(41))
    for number in range(12):
        observe_responses(drafter, salt(number), text, text)
    assert len(drafter) == 8
    for _ in range(8):
        observe_responses(drafter, salt(11), text)
    assert drafter._tenants.keys() >= {salt(11)}
    assert len(drafter) == 8
    assert drafter.num_bytes == sum(own.num_bytes for own in drafter._tenants.values())


def test_tables_are_not_taken_if_they_are_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix_drafter, "MAX_BYTES", 8 * SLOT_BYTES << FIRST_BITS)
    drafter, text = SuffixDrafter(), list(range(41))
    for number in range(8):
        observe_responses(drafter, salt(number), *[text] * (2 if number < 2 else 40))
    own = drafter._tenants[salt(7)]
    assert not drafter._free_memory(3 * SLOT_BYTES << FIRST_BITS, own), "two of the others have few tokens"
    assert len(drafter) == 8
    assert drafter._free_memory(2 * SLOT_BYTES << FIRST_BITS, own)
    assert drafter._tenants.keys() == {salt(number) for number in range(2, 8)}
    assert drafter.num_bytes == sum(each.num_bytes for each in drafter._tenants.values())


def test_old_tokens_count_less() -> None:
    drafter = learned(list(range(500)))
    before = drafter._tenants[TENANT].num_recent
    drafter.observe(1, token_ids(range(9)), RECENT_TOKENS, OTHER)
    assert drafter._tenants[TENANT].num_recent == before // 2


def test_rare_contexts_make_place_for_others() -> None:
    table, rng = SuffixTable(bits=1), Random(1)
    for _ in range(200):
        table.learn(token_ids([rng.randrange(1000) for _ in range(4)]), 1)
    for _ in range(3):
        table.learn(token_ids([1, 2, 3, 4]), 9)
    assert table.next_of(token_ids([1, 2, 3, 4]))[0] == 9


def test_forced_tokens_are_drafted_once() -> None:
    drafter = ForcedDrafter()
    drafter.offer(1, 2, tuple(range(40)))
    assert drafter.draft(1, token_ids([7, 7]), TENANT) == Draft(tuple(range(MAX_DRAFT_TOKENS)))
    assert drafter.draft(1, token_ids([7, 7]), TENANT) is None
    drafter.offer(1, 2, (5,))
    assert drafter.draft(1, token_ids([7, 7, 7]), TENANT) is None, "they were forced one token earlier"
