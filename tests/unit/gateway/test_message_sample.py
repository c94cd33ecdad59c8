"""Messages built from tokens: stop strings, special tokens, characters of several tokens, counts."""

from typing import Any

import pytest

from baton.core.client_api import ChoiceDelta, MessagePart, PartKind
from baton.core.ids import JobId
from baton.core.kv.block_hash import token_ids
from baton.core.request import FinishReason, GenerateRequest, Sampling, TokenDelta
from baton.gateway.input.client_call import MessageOptions, OutputOptions
from baton.gateway.output.builtin_formats import HERMES, THINK
from baton.gateway.output.formats import MessageParser, OutputFormat, ParserOptions, SpecialToken
from baton.gateway.output.parsing import message_parser
from baton.gateway.output.special_text import split_special
from baton.gateway.output.templates.response_template import load_response_template
from baton.gateway.output.templates.template_parser import TemplateFormat
from baton.gateway.request import message_sample
from baton.gateway.request.message_sample import MessageSample
from baton.gateway.request.output_builder import OutputBuilder
from baton.gateway.text.stop_strings import StopPatterns
from baton.gateway.text.tokenizer import ByteTokenizer
from tests.scripted_chats import ADDED, chat_tokenizer, ids_of
from tests.unit.gateway.output.output_cases import FORMATS, TOOLS, join_parts, parsed
from tests.unit.gateway.output.transcripts import TRANSCRIPTS, Transcript

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "stop"}}\n</tool_call>'
TOKENIZER = chat_tokenizer("qwen3")


def sample_of(
    *stops: str, min_tokens: int = 0, hides: bool = True, single_call: bool = False, **options: Any
) -> MessageSample:
    special = frozenset(token.text for token in ADDED.values())
    message = MessageOptions(
        output_format=OutputFormat(tools=HERMES, reasoning=THINK),
        parser=ParserOptions(special_tokens=special, single_call=single_call),
        **options,
    )
    tokens = TOKENIZER.added_tokens if hides else TOKENIZER.visible_tokens
    return MessageSample(
        TOKENIZER.detokenizer(skip_special_tokens=False), tokens, message, "seed", StopPatterns(stops), min_tokens
    )


def run(sample: MessageSample, text: str) -> tuple[dict[PartKind, str], int]:
    """Feed a text. Returns the joined text by kind, and the number of tokens until a stop string."""
    parts: list[MessagePart] = []
    ids = ids_of(text)
    num_used = len(ids)
    for number, id_ in enumerate(ids, 1):
        found = sample.put(id_)
        parts += sample.take()[1]
        if found:
            num_used = number
            break
    else:
        sample.finish(FinishReason.STOP)
        parts += sample.take()[1]
    joined = dict.fromkeys(PartKind, "")
    for part in parts:
        joined[part.kind] += part.text
    return joined, num_used


def test_stop_string_counts_only_in_the_content() -> None:
    text = f"<think>stop</think>no sto{CALL}x stop y"
    got, num_used = run(sample_of("stop"), text)
    assert got[PartKind.REASONING] == "stop"
    assert got[PartKind.TOOL_ARGUMENTS] == '{"a": "stop"}'
    assert "no sto" in got[PartKind.CONTENT]
    assert got[PartKind.CONTENT].rstrip().endswith("x")
    assert num_used == len(ids_of(text)) - len(" y")


def test_held_content_comes_before_the_call_that_follows_it() -> None:
    sample = sample_of("stop")
    kinds: list[PartKind] = []
    for id_ in ids_of(f"a sto{CALL}"):
        sample.put(id_)
        kinds += [part.kind for part in sample.take()[1]]
    order = list(dict.fromkeys(kinds))
    assert order == [PartKind.CONTENT, PartKind.TOOL_CALL, PartKind.TOOL_ARGUMENTS]


def test_stop_string_does_not_count_before_min_tokens() -> None:
    assert run(sample_of("b", min_tokens=4), "abcabc")[0][PartKind.CONTENT] == "abca"


def test_stop_string_that_is_no_stop_is_content_at_the_end() -> None:
    assert run(sample_of("stop"), "a sto")[0][PartKind.CONTENT] == "a sto"


@pytest.mark.parametrize(("hides", "content"), [(True, "ä"), (False, "ä<|im_end|>")])
def test_special_tokens_are_hidden_and_characters_are_complete(hides: bool, content: str) -> None:
    assert run(sample_of(hides=hides), "ä<|im_end|>")[0][PartKind.CONTENT] == content


def test_half_a_character_before_a_special_token_is_replaced() -> None:
    sample = sample_of()
    for id_ in (*"ä".encode()[:1], *ids_of(CALL)):
        sample.put(id_)
    sample.finish(FinishReason.STOP)
    parts = sample.take()[1]
    assert parts[0] == MessagePart(kind=PartKind.CONTENT, text="\ufffd")
    assert sample.num_calls == 1


def test_unwanted_reasoning_is_left_out_and_still_counted() -> None:
    sample = sample_of(include_reasoning=False)
    got, _ = run(sample, f"<think>so</think>{CALL}{CALL}")
    assert got[PartKind.REASONING] == ""
    assert got[PartKind.TOOL_CALL] == "ff"
    assert (sample.num_calls, sample.num_reasoning_tokens) == (2, 2)


@pytest.mark.parametrize("min_tokens", [0, 100])
def test_only_call_ends_the_sample_after_min_tokens(min_tokens: int) -> None:
    text = f"<think>so</think>a{CALL}b{CALL}" + "c" * 100
    got, num_used = run(sample_of(single_call=True, min_tokens=min_tokens), text)
    assert num_used == max(len(ids_of(text.partition("\n</tool_call>")[0])), min_tokens)
    assert got[PartKind.CONTENT] == "a"
    assert (got[PartKind.TOOL_CALL], got[PartKind.TOOL_ARGUMENTS]) == ("f", '{"a": "stop"}')


def sample_of_transcript(transcript: Transcript) -> tuple[MessageSample, list[int]]:
    """Return a sample, and the transcript as tokens: one for each byte and each special token."""
    added = {300 + number: SpecialToken(text) for number, text in enumerate(transcript.special)}
    id_of = {token.text: id_ for id_, token in added.items()}
    tokenizer = ByteTokenizer(vocab_size=512, added_tokens=added)
    ids: list[int] = []
    for piece in split_special(transcript.text, transcript.special):
        ids += list(piece.encode()) if isinstance(piece, str) else [id_of[piece.text]]
    message = MessageOptions(
        output_format=FORMATS[transcript.family],
        parser=ParserOptions(prompt=transcript.prompt, tools=TOOLS, special_tokens=frozenset(transcript.special)),
    )
    detokenizer = tokenizer.detokenizer(skip_special_tokens=False)
    return MessageSample(detokenizer, added, message, "", StopPatterns(()), 0), ids


@pytest.mark.parametrize("transcript", TRANSCRIPTS, ids=str)
def test_transcript_of_tokens_that_cut_characters(transcript: Transcript) -> None:
    sample, ids = sample_of_transcript(transcript)
    parts: list[MessagePart] = []
    for id_ in ids:
        assert not sample.put(id_)
        parts += sample.take()[1]
    assert not sample.finish(transcript.reason)
    parts += sample.take()[1]
    options = ParserOptions(prompt=transcript.prompt, tools=TOOLS, special_tokens=frozenset(transcript.special))
    pieces = split_special(transcript.text, transcript.special)
    assert join_parts(parts) == parsed(FORMATS[transcript.family], pieces, options, transcript.reason)


@pytest.mark.parametrize(
    ("text", "prompt", "expected"),
    [
        ("<think>abc</think>d", "", 3),
        ("abc</think>d", "<think>", 3),
        ("<think>a<b</think>d", "", 3),
        ("<think>aä</think>", "", 3),  # two tokens for one character
        ("<think>abc</thin", "", 3 + len("</thin")),
        ("no <think", "", 0),
        ("<think>a</think>b<think>cd</think>", "", 3),
        ("<think></think>b", "", 0),
        ("<think> a\n</think>b", "", 3),  # whitespace that is trimmed was generated, too
    ],
)
@pytest.mark.parametrize("special", [(), ("<think>", "</think>")], ids=["plain", "special"])
def test_reasoning_tokens_are_those_between_the_delimiters(
    text: str, prompt: str, expected: int, special: tuple[str, ...]
) -> None:
    sample, ids = sample_of_transcript(Transcript(family="hermes", case="", text=text, prompt=prompt, special=special))
    for id_ in ids:
        sample.put(id_)
    sample.finish(FinishReason.LENGTH)
    assert sample.num_reasoning_tokens == expected


def test_reasoning_tokens_of_harmony_and_of_a_response_template() -> None:
    text = "<|channel|>analysis<|message|>abc<|end|><|start|>assistant<|channel|>final<|message|>d"
    special = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>")
    sample, ids = sample_of_transcript(Transcript(family="gpt_oss", case="", text=text, special=special))
    for id_ in ids:
        sample.put(id_)
    assert sample.num_reasoning_tokens == 3
    fields = {"thinking": {"open": "<think>", "close": "</think>"}, "content": {}}
    template = TemplateFormat(load_response_template({"start_anchor": "<|a|>", "fields": fields}))
    message = MessageOptions(output_format=OutputFormat(template=template), parser=ParserOptions(prompt="<|a|><think>"))
    sample = MessageSample(TOKENIZER.detokenizer(), {}, message, "", StopPatterns(()), 0)
    for id_ in b"ab<</think>c":
        sample.put(id_)
    assert sample.num_reasoning_tokens == 3


class _Choices:
    """Collects choices."""

    def __init__(self) -> None:
        self.all: list[ChoiceDelta] = []

    async def begin(self) -> None: ...

    def put(self, choice: ChoiceDelta) -> None:
        self.all.append(choice)


def test_sample_is_created_with_its_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parsers of 128 samples take milliseconds, which must not be one turn of the event loop."""
    created: list[str] = []

    def parser(output_format: OutputFormat, options: ParserOptions) -> MessageParser:
        created.append(options.call_id_seed)
        return message_parser(output_format, options)

    monkeypatch.setattr(message_sample, "message_parser", parser)
    request = GenerateRequest(
        request_id=b"r",
        model="m",
        token_ids=token_ids((1,)),
        num_prompt_tokens=1,
        sampling=Sampling(max_tokens=8),
        sample_indices=tuple(range(128)),
        received_s=0.0,
        deadline_s=60.0,
    )
    message = MessageOptions(output_format=OutputFormat(tools=HERMES), parser=ParserOptions())
    choices = _Choices()
    output = OutputBuilder(request, OutputOptions(message=message), StopPatterns(()), TOKENIZER, choices, 0)
    assert created == []
    job = JobId(request_id=request.request_id, attempt=0)
    output.put(TokenDelta(job=job, sample_index=5, output_index=0, token_ids=(ord("a"),)))
    assert created == [f"{request.request_id.hex()}-5"]
    assert (choices.all[0].index, choices.all[0].parts[0].text, output.num_tokens) == (5, "a", 1)
    output.close()
