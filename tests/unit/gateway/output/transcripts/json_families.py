"""Transcripts of families that write a call as a JSON object."""

from baton.core.request import FinishReason
from tests.unit.gateway.output.transcripts.transcript import CITY, HARD, HARD_JSON, Transcript, family

HERMES = family(
    "hermes",
    {"case": "plain", "text": "Hello, world.\n", "content": "Hello, world.\n"},
    {"case": "reasoning", "text": "<think>\nHm.\n</think>\n\nHello.", "reasoning": "Hm.", "content": "Hello."},
    {
        "case": "one call",
        "text": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>',
        "calls": (("get_weather", CITY),),
    },
    {
        "case": "parallel calls",
        "text": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        "calls": (("get_weather", CITY), ("now", {})),
    },
    {
        "case": "text before and after",
        "text": 'Let me see.\n<tool_call>{"arguments": {}, "name": "now"}</tool_call>\nDone.',
        "content": "Let me see.\n\nDone.",
        "calls": (("now", {}),),
    },
    {
        "case": "hard arguments",
        "text": f'<tool_call>\n{{"name": "get_weather", "arguments": {HARD_JSON}}}\n</tool_call>',
        "calls": (("get_weather", HARD),),
    },
    {
        "case": "delimiters in arguments",
        "text": '<tool_call>{"name": "now", "arguments": {"a": "</tool_call><tool_call>", "</think>": 1}}</tool_call>',
        "calls": (("now", {"a": "</tool_call><tool_call>", "</think>": 1}),),
    },
    {
        "case": "no call",
        "text": 'a <tool_call>\n{"nome": 1}\n</tool_call> b',
        "content": 'a <tool_call>\n{"nome": 1}\n</tool_call> b',
    },
    {
        "case": "malformed arguments",
        "text": '<tool_call>{"name": "now", "arguments": {"a": tru}}</tool_call>!',
        "content": "!",
        "calls": (("now", '{"a": tru}}'),),
    },
    {
        "case": "truncated name",
        "text": '<tool_call>\n{"name": "no',
        "content": '<tool_call>\n{"name": "no',
        "reason": FinishReason.LENGTH,
    },
    {
        "case": "truncated arguments",
        "text": '<tool_call>\n{"name": "now", "arguments": {"a": "b',
        "calls": (("now", '{"a": "b'),),
        "reason": FinishReason.LENGTH,
    },
    {
        "case": "prompt opens the reasoning",
        "prompt": "<|im_start|>assistant\n<think>\n",
        "text": "Hm.\n</think>\n\nHello.",
        "reasoning": "Hm.",
        "content": "Hello.",
    },
    {
        "case": "prompt closes the reasoning",
        "prompt": "<|im_start|>assistant\n<think>\n\n</think>\n\n",
        "text": "Hello </think>.",
        "content": "Hello </think>.",
    },
    {
        "case": "arguments in a string and too many braces",
        "text": '<tool_call>{"name": "now", "arguments": "{\\"a\\": \\"\\\\u00e9\\"}"}}\n</tool_call>',
        "calls": (("now", {"a": "é"}),),
    },
    {
        "case": "escapes that JSON does not have",
        "text": '<tool_call>{"name": "now", "arguments": {"a": "\\d \\\' \\u12 \\n"}}</tool_call>',
        "calls": (("now", {"a": "\\d \\' \\u12 \n"}),),
    },
    {
        "case": "a call in the reasoning",
        "text": '<think>So <tool_call>{"name": "now"}</tool_call>?</think>No.',
        "reasoning": 'So <tool_call>{"name": "now"}</tool_call>?',
        "content": "No.",
    },
    {
        "case": "reasoning without an end",
        "prompt": "<|im_start|>assistant\n<think>\n",
        "text": "Hm. So",
        "reasoning": "Hm. So",
    },
    special=("<tool_call>", "</tool_call>", "<think>", "</think>"),
)

MISTRAL = family(
    "mistral",
    {"case": "plain", "text": "[1, 2]", "content": "[1, 2]"},
    {"case": "reasoning", "text": "[THINK]Hm.[/THINK]Hello.", "reasoning": "Hm.", "content": "Hello."},
    {"case": "one call", "text": '[TOOL_CALLS]get_weather[ARGS]{"city": "Oslo"}', "calls": (("get_weather", CITY),)},
    {
        "case": "parallel calls",
        "text": '[TOOL_CALLS]get_weather[CALL_ID]a1B2c3D4e[ARGS]{"city": "Oslo"}[TOOL_CALLS]now{}',
        "calls": (("get_weather", CITY), ("now", {})),
    },
    {
        "case": "text before",
        "text": "I look.[TOOL_CALLS]now[ARGS]{}",
        "content": "I look.",
        "calls": (("now", {}),),
    },
    {"case": "hard arguments", "text": f"[TOOL_CALLS]get_weather[ARGS]{HARD_JSON}", "calls": (("get_weather", HARD),)},
    {
        "case": "delimiters in arguments",
        "text": '[TOOL_CALLS]now[ARGS]{"a": "[TOOL_CALLS]x[ARGS]{}"}',
        "calls": (("now", {"a": "[TOOL_CALLS]x[ARGS]{}"}),),
    },
    {
        "case": "list of objects",
        "text": 'Yes [TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Oslo"}}, '
        '{"name": "now", "arguments": {}, "id": "abcdefghi"}]',
        "content": "Yes",
        "calls": (("get_weather", CITY), ("now", {})),
    },
    {"case": "no call", "text": "[TOOL_CALLS] and so on", "content": "[TOOL_CALLS] and so on"},
    {
        "case": "truncated",
        "text": '[TOOL_CALLS]get_weather[ARGS]{"city": "Os',
        "calls": (("get_weather", '{"city": "Os'),),
        "reason": FinishReason.LENGTH,
    },
    special=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"),
)

LLAMA = family(
    "llama3_json",
    {"case": "plain", "text": "Hello {name}.", "content": "Hello {name}."},
    {"case": "plain JSON", "text": '{"city": "Oslo"}', "content": '{"city": "Oslo"}'},
    {
        "case": "JSON with a name",
        "text": '{"name": "Bob", "parameters": {}}',
        "content": '{"name": "Bob", "parameters": {}}',
    },
    {
        "case": "one call",
        "text": '{"name": "get_weather", "parameters": {"city": "Oslo"}}',
        "calls": (("get_weather", CITY),),
    },
    {
        "case": "parallel calls",
        "text": '{"name": "get_weather", "parameters": {"city": "Oslo"}}; {"name": "now", "parameters": {}}',
        "calls": (("get_weather", CITY), ("now", {})),
    },
    {
        "case": "tag, with text before",
        "text": 'I look. <|python_tag|>{"type": "function", "name": "now", "parameters": {}}',
        "content": "I look.",
        "calls": (("now", {}),),
    },
    {
        "case": "hard arguments",
        "text": f'{{"name": "get_weather", "parameters": {HARD_JSON}}}',
        "calls": (("get_weather", HARD),),
    },
    {
        "case": "delimiters in arguments",
        "text": '{"name": "now", "parameters": {"a": "; {<|python_tag|>"}}',
        "calls": (("now", {"a": "; {<|python_tag|>"}),),
    },
    {"case": "code", "text": "<|python_tag|>print(1)", "content": "<|python_tag|>print(1)"},
    {
        "case": "truncated",
        "text": '{"name": "get_weather", "parameters": {"city": "Os',
        "calls": (("get_weather", '{"city": "Os'),),
        "reason": FinishReason.LENGTH,
    },
    special=("<|python_tag|>",),
)


def _json_list(name: str, begin: str, end: str, *special: str) -> list[Transcript]:
    """Return the transcripts of a family that writes a list of objects after `begin`."""
    city = '{"name": "get_weather", "arguments": {"city": "Oslo"}}'
    now = '{"name": "now", "arguments": {}}'
    return family(
        name,
        {"case": "plain", "text": f"{city} is no call", "content": f"{city} is no call"},
        {"case": "one call", "text": f"{begin}[{city}]{end}", "calls": (("get_weather", CITY),)},
        {
            "case": "parallel calls, with text before",
            "text": f"I look. {begin} [\n{city},\n{now}\n]{end}",
            "content": "I look.",
            "calls": (("get_weather", CITY), ("now", {})),
        },
        {
            "case": "hard arguments",
            "text": f'{begin}[{{"name": "get_weather", "arguments": {HARD_JSON}}}]{end}',
            "calls": (("get_weather", HARD),),
        },
        {"case": "no call", "text": f"{begin} are calls{end} x", "content": f"{begin} are calls{end} x"},
        {
            "case": "truncated",
            "text": f'{begin}[{{"name": "now", "arguments": {{"a": "b',
            "calls": (("now", '{"a": "b'),),
            "reason": FinishReason.LENGTH,
        },
        special=special,
    )


JSON_LISTS = [
    *_json_list("granite", "<|tool_call|>", "", "<|tool_call|>"),
    *_json_list("phi4_mini_json", "functools", ""),
    *_json_list("jamba", "<tool_calls>", "</tool_calls>", "<tool_calls>", "</tool_calls>"),
    *_json_list("nemotron_json", "<TOOLCALL>", "</TOOLCALL>"),
]
