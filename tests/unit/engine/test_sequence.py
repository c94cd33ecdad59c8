"""The end of samples, and the hash chain over output tokens."""

import pytest

from baton.core.kv.block_hash import token_ids
from baton.core.request import FinishReason
from baton.engine.state.sequence import EngineSequence, end_token_ids, finish_reason, max_cached_blocks
from tests.builders import hashes_of, sequence_request

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
EOS = (2,)


@pytest.mark.parametrize(
    ("token_id", "num_outputs_before", "sampling", "finish"),
    [
        (9, 0, {}, None),
        (2, 0, {}, STOP),
        (2, 0, {"ignore_eos": True}, None),
        (9, 0, {"stop_token_ids": (9,)}, STOP),
        (9, 0, {"stop_token_ids": (9,), "ignore_eos": True}, STOP),
        (9, 6, {}, None),
        (9, 7, {}, LENGTH),
        (2, 7, {}, STOP),
        (2, 2, {"min_tokens": 3}, None),
        (2, 3, {"min_tokens": 3}, STOP),
    ],
)
def test_finish_reason(
    token_id: int, num_outputs_before: int, sampling: dict[str, object], finish: FinishReason | None
) -> None:
    request = sequence_request(tokens=range(10, 15), max_tokens=8, sampling=sampling)
    assert (
        finish_reason(token_id, request, num_tokens=5 + num_outputs_before, eos_token_ids=EOS, max_model_len=100)
        is finish
    )


def test_max_model_len_ends_a_sample() -> None:
    request = sequence_request(tokens=range(10, 15))
    assert finish_reason(9, request, num_tokens=8, eos_token_ids=EOS, max_model_len=10) is None
    assert finish_reason(9, request, num_tokens=9, eos_token_ids=EOS, max_model_len=10) is LENGTH


def test_output_of_an_earlier_attempt_counts() -> None:
    request = sequence_request(tokens=range(10, 20), num_prompt_tokens=3, max_tokens=8)
    assert finish_reason(9, request, num_tokens=10, eos_token_ids=EOS, max_model_len=100) is LENGTH


def test_end_token_ids_have_no_duplicates() -> None:
    sampling = sequence_request(sampling={"stop_token_ids": (2, 9)}).sampling
    assert end_token_ids(sampling, EOS) == (2, 9)


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2)])
def test_cache_leaves_at_least_one_token_to_compute(num_tokens: int, num_blocks: int) -> None:
    assert max_cached_blocks(num_tokens, 4) == num_blocks


@pytest.mark.parametrize("num_prompt_tokens", [1, 3, 4, 5, 8])
def test_hash_chain_continues_over_output_tokens(num_prompt_tokens: int) -> None:
    tokens = list(range(30, 50))
    seq = EngineSequence(sequence_request(tokens=tokens[:num_prompt_tokens]), key=1, arrival=1)
    for token_id in tokens[num_prompt_tokens:]:
        seq.append(token_id)
    assert tuple(seq.hash_of_block(index, 4) for index in range(5)) == hashes_of(tokens)


def test_token_can_be_appended_while_the_buffer_is_exported() -> None:
    seq = EngineSequence(sequence_request(tokens=(1, 2)), key=1, arrival=1)
    with memoryview(seq.token_ids) as view:
        seq.append(3)
        assert list(view) == [1, 2]
    assert seq.token_ids == token_ids((1, 2, 3))


def test_tokens_of_the_request_are_not_modified() -> None:
    request = sequence_request(tokens=(1, 2))
    EngineSequence(request, key=1, arrival=1).append(3)
    assert request.token_ids == token_ids((1, 2))
