"""Token ids in responses: the same JSON as `json.dumps`, made once, and off the event loop."""

import json
from array import array

import pytest

from baton.gateway.http.output.id_json import IDS_PER_PIECE, format_ids, format_many_ids, repeated_prompts
from tests.loop_cpu import repeated_longest_turn_s
from tests.unit.gateway.validator_calls import completion

LIMIT_S = 0.05


@pytest.mark.parametrize("number", [0, 1, 2, IDS_PER_PIECE - 1, IDS_PER_PIECE, 2 * IDS_PER_PIECE + 1])
def test_ids_have_the_text_of_json(number: int) -> None:
    ids = array("I", range(number))
    assert format_ids(ids) == json.dumps(ids.tolist())


async def test_many_ids_take_little_cpu_time_of_the_loop() -> None:
    ids = array("I", range(2**20))
    longest_s, texts = await repeated_longest_turn_s(lambda: format_many_ids(ids, ids[:3]), LIMIT_S)
    assert (len(json.loads(texts[0])), texts[1]) == (2**20, "[0, 1, 2]")
    assert longest_s < LIMIT_S


async def test_prompts_are_formatted_only_if_the_response_repeats_them() -> None:
    assert await repeated_prompts(completion(prompt=[[1, 2], [3]], return_token_ids=True)) == ("[1, 2]", "[3]")
    assert await repeated_prompts(completion(prompt=[[1, 2], [3]])) == ()
