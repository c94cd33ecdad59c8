"""Output of a stream is held until the logprobs of its prompt are formatted."""

from array import array

import pytest

from baton.core.client_api import ChoiceDelta
from baton.core.errors import Code, Failure, Reason, Refused
from baton.core.request import PromptLogprobs
from baton.gateway.http.openai_logprobs import TokenNames
from baton.gateway.http.output.formatted_prompts import FormattedPrompts
from baton.gateway.http.output.prompt_lists import PROMPT_TOKENS_PER_PIECE
from baton.gateway.text.tokenizer import ByteTokenizer
from tests.unit.gateway.validator_calls import completion

SHORT, LONG = 3, PROMPT_TOKENS_PER_PIECE + 1
NAMES = TokenNames(ByteTokenizer(vocab_size=300))


def outputs(num_tokens: int) -> list[ChoiceDelta]:
    """Return output of two choices. The logprobs of the prompt come with the second one's first output."""
    number = num_tokens - 1
    logprobs = PromptLogprobs(num_top=0, chosen=array("f", [-1.0] * number), ranks=array("I", [1] * number))
    return [
        ChoiceDelta(index=1, text="a"),
        ChoiceDelta(index=0, text="b", prompt_logprobs=logprobs),
        ChoiceDelta(index=1, text="c"),
    ]


@pytest.mark.parametrize("num_tokens", [SHORT, LONG])
async def test_output_waits_for_the_logprobs_of_its_prompt_and_keeps_its_order(num_tokens: int) -> None:
    found: list[ChoiceDelta] = []
    call = completion(prompt=[65] * num_tokens, echo=True, logprobs=0, n=2, stream=True)
    formatted = FormattedPrompts(call, NAMES, found.append)
    first, *others = outputs(num_tokens)
    formatted.put(first)
    assert found == []
    for choice in others:
        formatted.put(choice)
    await formatted.wait()
    assert [choice.text for choice in found] == ["a", "b", "c"]
    assert b"".join(formatted.lists(first)["tokens"]) == b", ".join([b'"A"'] * num_tokens)
    formatted.close()


async def test_slow_reader_of_held_output_ends_the_call() -> None:
    def refuse(_: ChoiceDelta) -> None:
        raise Refused(Failure(code=Code.CANCELLED, reason=Reason.SLOW_READER, message="slow"))

    call = completion(prompt=[65] * LONG, echo=True, logprobs=0, n=2, stream=True)
    formatted = FormattedPrompts(call, NAMES, refuse)
    for choice in outputs(LONG):
        formatted.put(choice)
    with pytest.raises(Refused, match="slow"):
        await formatted.wait()
    with pytest.raises(Refused, match="slow"):
        formatted.put(outputs(LONG)[2])
    formatted.close()
