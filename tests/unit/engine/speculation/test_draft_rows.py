"""The rows of a sequence with drafts, and which of their tokens count."""

import pytest

from baton.core.kv.block_hash import token_ids
from baton.core.request import Sampling
from baton.engine.state.draft_rows import row_requests, rows_of, verified
from baton.engine.state.step import SampledToken, SampleRequest


def request(drafts: tuple[int, ...], *, min_tokens: int = 0) -> SampleRequest:
    """Return a request after a prompt of two tokens and two outputs."""
    return SampleRequest(
        sampling=Sampling(max_tokens=9, min_tokens=min_tokens),
        sample_indices=(3,),
        position=4,
        history=token_ids([5, 6, 7, 8, 99]),  # the engine may have appended a token
        num_prompt_tokens=2,
        banned_token_ids=(1,) if min_tokens > 2 else (),
        drafts=drafts,
    )


def tokens(*ids: int | None) -> list[SampledToken | None]:
    return [None if i is None else SampledToken(sample_index=3, token_id=i) for i in ids]


def test_each_row_draws_as_if_the_drafts_before_it_were_output() -> None:
    rows = rows_of(request((20, 21, 22)))
    assert [row.position for row in rows] == [4, 5, 6, 7]
    assert [list(row.tokens_before) for row in rows] == [[5, 6, 7, 8, 20, 21, 22][: 4 + i] for i in range(4)]
    assert [row.drafts for row in rows] == [(20, 21, 22), (21, 22), (22,), ()]


@pytest.mark.parametrize(("min_tokens", "num_banned"), [(0, 0), (2, 0), (3, 1), (4, 2), (5, 3), (9, 4)])
def test_end_tokens_are_banned_below_min_tokens(min_tokens: int, num_banned: int) -> None:
    rows = rows_of(request((20, 21, 22), min_tokens=min_tokens))
    assert [row.banned_token_ids for row in rows] == [(1,)] * num_banned + [()] * (4 - num_banned)


def test_request_without_drafts_is_its_own_row() -> None:
    one = request(())
    assert rows_of(one) == (one,)
    assert list(one.tokens_before) == [5, 6, 7, 8]
    assert [seq_id for seq_id, _ in row_requests([(1, request((20, 21))), (2, one)])] == [1, 1, 1, 2]


@pytest.mark.parametrize(
    ("drawn", "count"),
    [((20, 21, 4), 3), ((20, 4, 21), 2), ((4, 21, 22), 1), ((20, None, 4), 1), ((20, 21, None), 2), ((None, 21), 0)],
)
def test_tokens_count_up_to_the_first_that_is_not_its_draft(drawn: tuple[int | None, ...], count: int) -> None:
    assert verified((20, 21), tokens(*drawn)) == tuple(tokens(*drawn)[:count])


def test_rows_after_a_wrong_draft_are_not_drawn() -> None:
    asked = iter(tokens(4, 21, 22))
    verified((20, 21), asked)
    assert len(list(asked)) == 2
