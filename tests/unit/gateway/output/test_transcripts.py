"""Golden transcripts of each family of models, divided into pieces in every way that matters."""

import json
from typing import Any

import pytest

from baton.core.client_api import MessagePart
from baton.core.request import FinishReason
from baton.gateway.output.formats import MessageParser, OutputFormat, ParserOptions, SpecialToken
from baton.gateway.output.parsing import message_parser
from tests.unit.gateway.output.output_cases import FORMATS, TOOLS, ParsedMessage, divisions, parsed, parts_of
from tests.unit.gateway.output.transcripts import TRANSCRIPTS, Transcript


def options(transcript: Transcript, *, special: bool) -> ParserOptions:
    tokens = frozenset(transcript.special) if special else frozenset()
    return ParserOptions(prompt=transcript.prompt, tools=TOOLS, special_tokens=tokens)


def as_values(message: ParsedMessage) -> tuple[tuple[str, Any], ...]:
    return tuple((call.name, _value(call.arguments)) for call in message.tool_calls)


def _value(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


@pytest.mark.fault("F-58")
@pytest.mark.parametrize("special", [False, True], ids=["plain", "special"])
@pytest.mark.parametrize("transcript", TRANSCRIPTS, ids=str)
def test_transcript_is_parsed_alike_at_every_split(transcript: Transcript, special: bool) -> None:
    """The delimiters are plain text, or special tokens. The text is divided at every character, and at each
    one alone."""
    tokens = transcript.special if special else ()
    cuts = [[place] for place in range(1, len(transcript.text))]
    whole, *others = (
        parsed(FORMATS[transcript.family], pieces, options(transcript, special=special), transcript.reason)
        for pieces in divisions(transcript.text, tokens, cuts)
    )
    assert (whole.content, whole.reasoning) == (transcript.content, transcript.reasoning)
    assert as_values(whole) == transcript.calls
    assert all(other == whole for other in others)


def texts(parts: tuple[MessagePart, ...]) -> list[str]:
    return [part.text for part in parts]


def test_name_comes_first_and_arguments_as_they_are_written() -> None:
    pieces = [
        "<tool",
        '_call>{"na',
        'me": "now", "argu',
        'ments": {"a',
        '": 1',
        "2",
        ', "b": "x',
        "y",
        '"}',
        "}</tool_call>",
    ]
    steps = parts_of(FORMATS["hermes"], pieces)
    assert [texts(step) for step in steps] == [
        *[[], [], []],
        ["now", '{"a'],
        ['": '],  # a number is sent when it is complete
        [],
        ['12, "b": "x'],
        ["y"],
        ['"}'],
        [],
        [],
    ]


def test_only_text_that_may_begin_a_delimiter_is_held_back() -> None:
    pieces = ["a <", "b> <t", "ool", "_calls> c"]
    steps = parts_of(FORMATS["hermes"], pieces)
    assert [texts(step) for step in steps] == [["a"], [" <b>"], [], [" <tool_calls> c"], []]


def test_string_parameters_are_streamed() -> None:
    pieces = ["<function=get_weather><parameter=city>\n", "Os", "lo", "\n", "</parameter>", "\n</function>"]
    steps = parts_of(FORMATS["qwen3_coder"], pieces)
    assert [texts(step) for step in steps] == [["get_weather", '{"city": "'], ["Os"], ["lo"], [], [], ['"}'], []]


def test_delimiter_that_is_a_special_token_counts_only_as_the_token() -> None:
    special = ParserOptions(special_tokens=frozenset(("<tool_call>", "</tool_call>", "<think>", "</think>")))
    spelled = '<think>a</think><tool_call>{"name": "now"}</tool_call>'
    message = parsed(FORMATS["hermes"], [spelled], special)
    assert (message.content, message.tool_calls) == (spelled, ())
    body = '{"name": "now", "arguments": {"a": "</tool_call>"}} '
    message = parsed(FORMATS["hermes"], [SpecialToken("<tool_call>"), body, SpecialToken("</tool_call>"), "b"], special)
    assert as_values(message) == (("now", {"a": "</tool_call>"}),)
    assert message.content == "b"


@pytest.mark.parametrize(("hidden", "content"), [(True, "ab"), (False, "a<eos>b")])
def test_special_token_that_is_no_delimiter_is_text_only_if_it_is_not_hidden(hidden: bool, content: str) -> None:
    message = parsed(FORMATS["hermes"], ["a", SpecialToken("<eos>", hidden=hidden), "b"])
    assert message.content == content


def test_added_tokens_of_whitespace_and_words_are_text() -> None:
    tokens = frozenset(("<tool_call>", "</tool_call>", "\n", "name", '"'))
    added = {token: SpecialToken(token, hidden=False) for token in tokens}
    pieces = [added["<tool_call>"], added["\n"], '{"', added["name"], '": ', added['"'], 'now"}', added["\n"]]
    message = parsed(FORMATS["hermes"], [*pieces, added["</tool_call>"]], ParserOptions(special_tokens=tokens))
    assert (message.content, as_values(message)) == ("", (("now", {}),))


def test_text_cannot_imitate_a_special_token_of_the_parser() -> None:
    special = ParserOptions(special_tokens=frozenset(("<tool_call>",)))
    for code in range(0xD800, 0xD820):
        message = parsed(FORMATS["hermes"], [chr(code) + '{"name": "now"}'], special)
        assert message.content == '\ufffd{"name": "now"}'


def test_ids_are_made_from_the_seed_and_the_models_valid_ids_are_kept() -> None:
    text = "".join(f"[TOOL_CALLS]now[CALL_ID]{call_id}[ARGS]{{}}" for call_id in ("a1B2c3D4e", "short", "a1B2c3D4e"))
    text += "[TOOL_CALLS]now[ARGS]{}"
    ids = [
        [call.call_id for call in parsed(FORMATS["mistral"], [text], ParserOptions(call_id_seed=seed)).tool_calls]
        for seed in ("r/0", "r/0", "r/1")
    ]
    assert ids[0] == ids[1]
    assert ids[0][0] == ids[2][0] == "a1B2c3D4e"
    assert len({*ids[0], *ids[2]}) == 7
    assert all(len(call_id) == 9 and call_id.isalnum() for call_id in ids[0])
    other = parsed(FORMATS["hermes"], ['<tool_call>{"name": "now"}</tool_call>'], ParserOptions(call_id_seed="r/0"))
    assert other.tool_calls[0].call_id == "call_861325fadc4b55507881f26e"


def test_ids_of_kimi_are_kept_as_they_stand_in_place_of_names() -> None:
    begin, argument, end = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
    calls = "".join(f"{begin}{call}{argument}{{}}{end}" for call in ("functions.now:3", "functions.a.b:4", "now"))
    text = f"<|tool_calls_section_begin|>{calls}<|tool_calls_section_end|>"
    message = parsed(FORMATS["kimi_k2"], [text])
    assert [(call.name, call.call_id) for call in message.tool_calls] == [
        ("now", "functions.now:3"),
        ("a.b", "functions.a.b:4"),
        ("now", "now"),
    ]


def test_calls_are_content_if_they_are_not_to_be_parsed() -> None:
    text = '<think>a</think>b <tool_call>{"name": "now"}</tool_call>'
    message = parsed(FORMATS["hermes"], [text], ParserOptions(parse_tools=False))
    assert (message.content, message.reasoning) == ('b <tool_call>{"name": "now"}</tool_call>', "a")
    harmony = "<|channel|>commentary to=functions.now<|message|>{}<|call|>"
    assert parsed(FORMATS["gpt_oss"], [harmony], ParserOptions(parse_tools=False)).content == harmony


def test_parser_says_which_text_is_reasoning_and_how_many_calls_began() -> None:
    parser: MessageParser = message_parser(FORMATS["hermes"], ParserOptions(prompt="<|x|><think>\n"))
    seen = []
    for piece in ("a", "b<", "/think>", "b<think>", "c</think>", '<tool_call>{"name": "now", "arguments":', "{}}"):
        parser.put(piece)
        seen.append((*parser.progress, parser.num_calls))
    assert seen == [
        (1, 1, 0, 1, 0),
        (3, 2, 0, 2, 0),  # what may begin a delimiter is not read yet
        (10, 10, 0, 2, 0),
        (18, 18, 0, 2, 0),
        (27, 27, 18, 19, 0),
        (66, 66, 18, 19, 0),
        (69, 69, 18, 19, 1),
    ]


def test_call_that_a_harmony_prompt_begins_is_part_of_the_message() -> None:
    prompt = '<|start|>assistant<|channel|>commentary to=functions.now<|message|>{"a":'
    message = parsed(FORMATS["gpt_oss"], [" 1}", "<|call|>"], ParserOptions(prompt=prompt))
    assert as_values(message) == (("now", {"a": 1}),)


def test_message_without_a_format_is_content() -> None:
    text = " <think>a</think>\n"
    assert parsed(OutputFormat(), [text]).content == text


@pytest.mark.fault("F-58")
def test_call_that_ends_without_its_delimiters_is_complete_unless_it_was_truncated() -> None:
    text = "<function=now>\n<parameter=a>\nb\n</parameter>\n"
    message = parsed(FORMATS["qwen3_coder"], [text], reason=FinishReason.STOP)
    assert as_values(message) == (("now", {"a": "b"}),)
    message = parsed(FORMATS["qwen3_coder"], [text], reason=FinishReason.LENGTH)
    assert as_values(message) == (("now", '{"a": "b"'),)
