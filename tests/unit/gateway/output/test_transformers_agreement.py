"""Golden transcripts of every family, compared with the parser of `transformers`.

It needs a response template for each family. What those templates cannot say is listed with the reason.
"""

import logging
import re
from typing import Any

import pytest

from tests.unit.gateway.output.output_cases import FORMATS, TOOLS
from tests.unit.gateway.output.test_response_templates import CASES, NAMED, THINK, reference, template
from tests.unit.gateway.output.transcripts import TRANSCRIPTS, Transcript

LISTED = {"function": {"name": "{name}", "arguments": "{arguments}"}}
TAGS = {"name": "json", "args": {"allow_non_json": True, "strip": False}}


def json_list(begin: str, end: str = "") -> dict[str, Any]:
    """Return the template of a family that writes a list of objects after `begin`."""
    close = {"close": end} if end else {}
    calls = {"open_pattern": rf"\s*{begin}\s*(?=\[)", "content": "json", "transform": LISTED, "transform_each": True}
    return template("<|a|>", thinking=THINK, content={}, tool_calls={**calls, **close})


def named(open_pattern: str, close_pattern: str) -> dict[str, Any]:
    """Return the template of a family that writes a name and JSON."""
    calls = {"open_pattern": open_pattern, "close_pattern": close_pattern, "repeats": True}
    return template("｜>", thinking=THINK, content={}, tool_calls={**calls, "content": "json", "transform": NAMED})


def tagged(
    open_pattern: str, close_pattern: str, tag_pattern: str, anchor: str = "<|a|>", think: str = "think"
) -> dict[str, Any]:
    """Return the template of a family that writes each parameter between delimiters."""
    args = {"tag_pattern": tag_pattern, "value_parser": TAGS}
    calls = {"open_pattern": open_pattern, "close_pattern": close_pattern, "repeats": True}
    calls |= {"content": "xml-inline", "content_args": args, "transform": NAMED}
    thinking = {"open": f"<{think}>", "close": f"</{think}>"}
    return template(anchor, thinking=thinking, content={}, tool_calls=calls)


GLM = tagged(
    r"\s*<tool_call>(?P<name>[^\s<]+)(?=\s*<)",
    "</tool_call>",
    r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>",
)
DSML = tagged(
    r"(?:\s*<｜DSML｜\w+_calls>)?\s*<｜DSML｜invoke name=\"(?P<name>[^\"]+)\">",
    r"</｜DSML｜invoke>(?:\s*</｜DSML｜\w+_calls>)?",
    r"<｜DSML｜parameter name=\"(?P<key>[^\"]+)\" string=\"\w+\">(?P<value>.*?)</｜DSML｜parameter>",
    "<｜Assistant｜>",
)
ORACLES = {
    "hermes": CASES["json"].template,
    "qwen3_coder": tagged(
        r"\s*<tool_call>\s*<function=(?P<name>[^>\s]+)>",
        r"</function>\s*</tool_call>",
        r"<parameter=(?P<key>\w+)>\n(?P<value>.*?)\n</parameter>",
        "<|im_start|>assistant\n",
    ),
    "glm45": GLM,
    "glm47": GLM,
    "minimax_m2": tagged(
        r"(?:\s*<minimax:tool_call>)?\s*<invoke name=\"(?P<name>[^\"]+)\">",
        r"</invoke>(?:\s*</minimax:tool_call>)?",
        r"<parameter name=\"(?P<key>[^\"]+)\">(?P<value>.*?)</parameter>",
        "]~b]ai\n",
    ),
    "seed_oss": tagged(
        r"\s*<seed:tool_call>\s*<function=(?P<name>[^>]+)>",
        "</seed:tool_call>",
        r"<parameter=(?P<key>[^>]+)>(?P<value>.*?)</parameter>",
        think="seed:think",
    ),
    "deepseek_v32": DSML,
    "deepseek_v4": DSML,
    "mistral": template(
        "[/INST]",
        thinking={"open": "[THINK]", "close": "[/THINK]"},
        content={},
        tool_calls={
            "open_pattern": r"\[TOOL_CALLS\](?P<name>[^\[{\s]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?",
            "close_pattern": r"(?=\[TOOL_CALLS\])",
            "repeats": True,
            "content": "json",
            "transform": NAMED,
        },
    ),
    "llama3_json": template(
        "<|a|>",
        content={},
        tool_calls={
            "open_pattern": r"^(?=\{\"name\": \"(?:now|get_weather))|\s*<\|python_tag\|>(?=\{)",
            "close_pattern": r"\Z",
            "content": "json",
            "transform": {"function": {"name": "{content.name}", "arguments": "{content.parameters}"}},
        },
    ),
    "granite": json_list(r"<\|tool_call\|>"),
    "phi4_mini_json": json_list("functools"),
    "jamba": json_list("<tool_calls>", "</tool_calls>"),
    "nemotron_json": json_list("<TOOLCALL>", "</TOOLCALL>"),
    "deepseek_v3": named(
        r"(?:\s*<｜tool▁calls▁begin｜>)?\s*<｜tool▁call▁begin｜>function<｜tool▁sep｜>(?P<name>[^\n]+)\n```json\n",
        r"\n```<｜tool▁call▁end｜>(?:<｜tool▁calls▁end｜>)?",
    ),
    "deepseek_v31": named(
        r"(?:\s*<｜tool▁calls▁begin｜>)?\s*<｜tool▁call▁begin｜>(?P<name>[^<]+)<｜tool▁sep｜>",
        r"<｜tool▁call▁end｜>(?:<｜tool▁calls▁end｜>)?",
    ),
    "kimi_k2": named(
        r"(?:\s*<\|tool_calls_section_begin\|>)?\s*<\|tool_call_begin\|>\s*(?:functions\.)?(?P<name>[^:\s]+):\d+\s*"
        r"<\|tool_call_argument_begin\|>",
        r"<\|tool_call_end\|>(?:\s*<\|tool_calls_section_end\|>)?",
    ),
    "gpt_oss": template(
        "<|start|>assistant",
        thinking={"open": "<|channel|>analysis<|message|>", "close": "<|end|>"},
        content={"open": "<|channel|>final<|message|>", "close": "<|return|>"},
        tool_calls={
            "open_pattern": r"<\|channel\|>commentary to=functions\.(?P<name>\w+).*?<\|message\|>",
            "close": "<|call|>",
            "repeats": True,
            "content": "json",
            "transform": NAMED,
        },
    ),
    "gemma4": CASES["dialect"].template,
    "functiongemma": template(
        "<|a|>",
        content={},
        tool_calls={
            "open_pattern": r"\s*<start_function_call>call:(?P<name>\w+)",
            "close": "<end_function_call>",
            "repeats": True,
            "content": "json",
            "content_args": {"unquoted_keys": True, "string_delims": [["<escape>", "<escape>"]]},
            "transform": NAMED,
        },
    ),
}

TRUNCATED = "transformers refuses a call that is cut, or drops its last argument; Baton sends what was written"
MALFORMED = "transformers refuses text that is no call or no JSON; Baton returns it as it was written"
FIRST_END = "transformers ends a region at the first text of its delimiter, also inside of an argument"
ENDS_REASONING = "models of this family leave out the end of the reasoning before a call, which a template cannot say"
NOT_IN_TEMPLATE = "a response template has one form of a field; Baton reads this form of a call, too"
HEADERS = "a response template has no rule for other headers of harmony messages"
GEMMA = {"delimiters in arguments": FIRST_END, "malformed arguments": MALFORMED, "truncated": TRUNCATED}
DIFFERENCES: dict[str, dict[str, str]] = {
    "hermes": {
        "delimiters in arguments": FIRST_END,
        "no call": MALFORMED,
        "malformed arguments": MALFORMED,
        "escapes that JSON does not have": MALFORMED,
        "arguments in a string and too many braces": MALFORMED,
        "truncated name": TRUNCATED,
        "truncated arguments": TRUNCATED,
    },
    "mistral": {
        "delimiters in arguments": FIRST_END,
        "list of objects": NOT_IN_TEMPLATE,
        "truncated": TRUNCATED,
    },
    "llama3_json": {"parallel calls": NOT_IN_TEMPLATE, "truncated": TRUNCATED},
    "granite": {"truncated": TRUNCATED},
    "phi4_mini_json": {"truncated": TRUNCATED},
    "jamba": {"truncated": TRUNCATED},
    "nemotron_json": {"truncated": TRUNCATED},
    "qwen3_coder": {
        "text before, without the outer tag": NOT_IN_TEMPLATE,
        "malformed after the name": MALFORMED,
        "a call ends the reasoning": ENDS_REASONING,
        "truncated": TRUNCATED,
    },
    "glm45": {"delimiters in arguments": FIRST_END, "truncated": TRUNCATED},
    "minimax_m2": {"plain": "the template cannot ask for the section around a call", "truncated": TRUNCATED},
    "seed_oss": {"truncated": TRUNCATED},
    "deepseek_v32": {
        "the mark tells the type and not the schema": "transformers converts by the schema only",
        "truncated": TRUNCATED,
    },
    "deepseek_v3": {"malformed arguments": MALFORMED, "truncated": TRUNCATED},
    "deepseek_v31": {"truncated": TRUNCATED},
    "kimi_k2": {"a call ends the reasoning": ENDS_REASONING, "truncated": TRUNCATED},
    "gpt_oss": {
        "parallel calls": "the second call of the transcript has no arguments, which is no JSON",
        "preamble": HEADERS,
        "recipient before the channel": HEADERS,
        "built-in tool": HEADERS,
        "no channel": HEADERS,
        "no call": MALFORMED,
        "malformed arguments": MALFORMED,
        "prompt begins the reasoning": "transformers counts the text of the prompt as part of the message",
        "truncated": TRUNCATED,
    },
    "gemma4": GEMMA,
    "functiongemma": GEMMA,
}
"""Reason of each difference, by family and case. All other transcripts are equal."""


def outcome(transcript: Transcript) -> tuple[str, str, list[Any]] | None:
    """Return content, reasoning and calls as transformers reads them; None if it refuses the text.

    Content from several places is joined without whitespace, because Baton keeps what stands between them.
    """
    logging.getLogger("transformers").setLevel(logging.ERROR)
    tools = [{"function": {"name": name, "parameters": schema}} for name, schema in TOOLS.items()]
    values = reference(ORACLES[transcript.family], transcript.text, transcript.prompt, tools)
    if values is None:
        return None
    content, reasoning = values.get("content", []), values.get("thinking", values.get("reasoning_content", []))
    text = content[0] if len(content) == 1 else re.sub(r"\s", "", "".join(content))
    calls = [
        call["function"]
        for value in values.get("tool_calls", [])
        for call in (value if isinstance(value, list) else [value])
    ]
    return text, "".join(reasoning), [(call.get("name"), call.get("arguments")) for call in calls]


def expected(transcript: Transcript, *, without_space: bool) -> tuple[str, str, list[Any]]:
    content = re.sub(r"\s", "", transcript.content) if without_space else transcript.content.strip()
    return content, transcript.reasoning.strip(), list(transcript.calls)


def agrees(transcript: Transcript) -> bool:
    found = outcome(transcript)
    return found in (expected(transcript, without_space=False), expected(transcript, without_space=True))


@pytest.mark.parametrize("transcript", TRANSCRIPTS, ids=str)
def test_transcript_agrees_with_transformers_or_is_a_listed_difference(transcript: Transcript) -> None:
    reason = DIFFERENCES.get(transcript.family, {}).get(transcript.case)
    assert agrees(transcript) is (reason is None), (outcome(transcript), expected(transcript, without_space=False))


def test_every_family_is_compared_and_no_difference_is_stale() -> None:
    assert set(ORACLES) | {"mistral_list"} == set(FORMATS)
    cases = {(transcript.family, transcript.case) for transcript in TRANSCRIPTS}
    assert {(family, case) for family, listed in DIFFERENCES.items() for case in listed} <= cases
