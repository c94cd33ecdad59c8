"""Messages of clients are bounded in their number of fields, and large ones are decoded in a thread."""

import threading

import pytest

from baton.core.errors import Reason, Refused
from baton.core.kv.block_hash import token_ids
from baton.rpc.gates.client_message import MAX_FIELDS, decode_message, has_more_fields
from baton.rpc.mappers.client_mapper import from_generate_request, from_token_ids, to_tokenize_response
from baton.runtime.process import loop_time
from baton.v1.inference_pb2 import GenerateRequest, TokenizeResponse
from tests.longest_call import longest_call_s


@pytest.mark.parametrize(
    ("raw", "number"),
    [
        (b"", 0),
        (GenerateRequest(prompt="x" * 1000).SerializeToString(), 1),
        (GenerateRequest(token_ids=[1, 2, 300], n=2, temperature=0.5).SerializeToString(), 3),
        (GenerateRequest(stop=["", "a", "b"], logit_bias={1: 1.0, 2: 2.0}).SerializeToString(), 5),
        (b"\x0b\x0c", 2),  # a group
        (b"\x0d\0\0\0\0\x09\0\0\0\0\0\0\0\0", 2),  # fixed32, fixed64
        (b"\x12\xff\xff\xff\xff\x0f", 1),  # a length beyond the end
        (b"\x18\xff", 1),  # an unfinished number
        (b"\x0f\x12\0", 1),  # an invalid type ends the search
    ],
)
def test_fields_are_counted(raw: bytes, number: int) -> None:
    assert not has_more_fields(raw, number)
    assert number == 0 or has_more_fields(raw, number - 1)


async def test_large_message_is_decoded_in_a_thread() -> None:
    threads: list[threading.Thread] = []

    def decode(raw: bytes) -> GenerateRequest:
        threads.append(threading.current_thread())
        return GenerateRequest.FromString(raw)

    for length in (10, loop_time.MESSAGE_BYTES):
        message = GenerateRequest(prompt="x" * length)
        assert await decode_message(message.SerializeToString(), decode) == message
    assert [thread is threading.main_thread() for thread in threads] == [True, False]


async def test_message_with_too_many_fields_is_refused_before_it_is_decoded() -> None:
    raw = GenerateRequest(stop=[""] * (MAX_FIELDS + 1)).SerializeToString()
    with pytest.raises(Refused, match=f"more than {MAX_FIELDS} fields") as refused:
        await decode_message(raw, lambda raw: pytest.fail("it was decoded"))
    assert refused.value.failure.reason is Reason.INVALID_REQUEST
    raw = GenerateRequest(stop=[""] * MAX_FIELDS).SerializeToString()
    assert await decode_message(raw, len) == len(raw)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (GenerateRequest(stop=[""] * 17), "stop has 17 items; at most 16 are allowed"),
        (GenerateRequest(stop_token_ids=[1] * 129), "stop_token_ids has 129 items; at most 128"),
        (GenerateRequest(logit_bias=dict.fromkeys(range(1025), 1.0)), "logit_bias has 1025 items; at most 1024"),
        (GenerateRequest(token_ids=[1] * (2**20 + 1)), "token_ids has 1048577 items; at most 1048576"),
    ],
)
def test_too_long_list_is_refused_before_it_is_converted(message: GenerateRequest, words: str) -> None:
    with pytest.raises(Refused, match=words):
        from_generate_request(message)


def test_many_token_ids_become_an_array() -> None:
    for number in (1, 1023, 1024, 5000):
        ids = from_token_ids(GenerateRequest(token_ids=range(number)).token_ids)
        assert list(ids) == list(range(number))
        assert isinstance(ids, list) == (number < 1024)


@pytest.mark.parametrize("number", [0, 1, 1023, 1024, 8192, 8193, 100_000])
def test_many_token_ids_survive_the_conversion_in_slices(number: int) -> None:
    ids = token_ids(range(number))
    assert token_ids(from_token_ids(GenerateRequest(token_ids=ids).token_ids)) == ids
    assert token_ids(TokenizeResponse.FromString(to_tokenize_response(ids)).token_ids) == ids


def test_conversion_of_many_token_ids_lets_other_threads_run() -> None:
    ids = token_ids(range(2**19))
    message = GenerateRequest(token_ids=ids)
    assert longest_call_s(from_token_ids, message.token_ids) < longest_call_s(token_ids, message.token_ids) / 4
    assert longest_call_s(to_tokenize_response, ids) < longest_call_s(lambda: TokenizeResponse(token_ids=ids)) / 4
