"""Golden transcripts: what models of each family write, and the message that it is."""

import json
from dataclasses import dataclass
from typing import Any

from baton.core.request import FinishReason


@dataclass(frozen=True, kw_only=True)
class Transcript:
    """A text of a model, and its message. The arguments of calls are values, or text if they are no JSON."""

    family: str
    case: str
    text: str
    content: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, Any], ...] = ()
    prompt: str = ""
    special: tuple[str, ...] = ()
    reason: FinishReason = FinishReason.STOP

    def __str__(self) -> str:
        return f"{self.family}-{self.case}"


HARD = {"city": 'Zürich "HB" \\ 北京 😀\n', "where": {"at": [1, {"x": None}], "b": True}}
"""Arguments with quotes, escapes, Unicode and nesting."""
HARD_JSON = json.dumps(HARD, ensure_ascii=False)
CITY = {"city": "Oslo"}


def family(name: str, *cases: dict[str, Any], **common: Any) -> list[Transcript]:
    """Return the transcripts of a family."""
    return [Transcript(family=name, **{**common, **case}) for case in cases]


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
    special=("<tool_call>", "</tool_call>", "<think>", "</think>"),
)

QWEN3_CODER = family(
    "qwen3_coder",
    {"case": "plain", "text": "a <parameter=x> b", "content": "a <parameter=x> b"},
    {"case": "reasoning", "text": "<think>Hm.</think>\nHello.", "reasoning": "Hm.", "content": "Hello."},
    {
        "case": "one call",
        "text": "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>",
        "calls": (("get_weather", CITY),),
    },
    {
        "case": "parallel calls",
        "text": "<tool_call>\n<function=now>\n</function>\n</tool_call>\n<tool_call>\n<function=get_weather>\n"
        "<parameter=days>\n3\n</parameter>\n<parameter=metric>\nTrue\n</parameter>\n</function>\n</tool_call>",
        "calls": (("now", {}), ("get_weather", {"days": 3, "metric": True})),
    },
    {
        "case": "text before, without the outer tag",
        "text": "I look.\n<function=get_weather>\n<parameter=ratio>\n2.50\n</parameter>\n</function>\n</tool_call>",
        "content": "I look.",
        "calls": (("get_weather", {"ratio": 2.5}),),
    },
    {
        "case": "hard arguments",
        "text": "<tool_call>\n<function=get_weather>\n<parameter=city>\n" + HARD["city"] + "\n</parameter>\n"
        '<parameter=where>\n{"at": [1, {"x": null}], "b": true}\n</parameter>\n'
        "<parameter=note>\nnull\n</parameter>\n<parameter=tags>\nnone\n</parameter>\n</function>\n</tool_call>",
        "calls": (("get_weather", {**HARD, "note": None, "tags": "none"}),),
    },
    {
        "case": "delimiters in arguments",
        "text": "<tool_call>\n<function=now>\n<parameter=a>\n  <b></parameter></b>\n\n</parameter>\n</function>\n"
        "</tool_call>",
        "calls": (("now", {"a": "  <b></parameter></b>\n"}),),
    },
    {
        "case": "no call",
        "text": "<tool_call>\n<fun>\n</tool_call> x",
        "content": "<tool_call>\n<fun>\n</tool_call> x",
    },
    {
        "case": "malformed after the name",
        "text": "<tool_call>\n<function=now>\nxyz</function>\n</tool_call>",
        "calls": (("now", {}),),
        "content": "xyz</function>\n</tool_call>",
    },
    {
        "case": "truncated",
        "text": "<tool_call>\n<function=get_weather>\n<parameter=city>\nOs",
        "calls": (("get_weather", '{"city": "Os'),),
        "reason": FinishReason.LENGTH,
    },
    special=("<tool_call>", "</tool_call>", "<think>", "</think>"),
)

GLM = family(
    "glm45",
    {"case": "plain", "text": "1 < 2", "content": "1 < 2"},
    {"case": "reasoning", "text": "\n<think>Hm.</think>\nHello.", "reasoning": "Hm.", "content": "Hello."},
    {
        "case": "one call",
        "text": "\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n</tool_call>",
        "calls": (("get_weather", CITY),),
    },
    {
        "case": "parallel calls, without newlines",
        "text": "<tool_call>now</tool_call><tool_call>get_weather<arg_key>days</arg_key><arg_value>3</arg_value>"
        "</tool_call>",
        "calls": (("now", {}), ("get_weather", {"days": 3})),
    },
    {
        "case": "text before",
        "text": "I look.\n<tool_call>now\n</tool_call>",
        "content": "I look.",
        "calls": (("now", {}),),
    },
    {
        "case": "hard arguments",
        "text": "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>" + HARD["city"] + "</arg_value>\n"
        '<arg_key>where</arg_key>\n<arg_value>{"at": [1, {"x": null}], "b": true}</arg_value>\n</tool_call>',
        "calls": (("get_weather", HARD),),
    },
    {
        "case": "values without a schema",
        "text": "<tool_call>other\n<arg_key>a</arg_key>\n<arg_value>[1]</arg_value>\n<arg_key>b</arg_key>\n"
        "<arg_value>x y</arg_value>\n<arg_key>c</arg_key>\n<arg_value>null</arg_value>\n<arg_key>d</arg_key>\n"
        "<arg_value>1.5</arg_value>\n<arg_key>e</arg_key>\n<arg_value>true</arg_value>\n</tool_call>",
        "calls": (("other", {"a": [1], "b": "x y", "c": None, "d": 1.5, "e": True}),),
    },
    {
        "case": "delimiters in arguments",
        "text": "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value></arg_value> </think></arg_value>\n"
        "</tool_call>",
        "calls": (("get_weather", {"city": "</arg_value> </think>"}),),
    },
    {
        "case": "no call",
        "text": "<tool_call>that is a tag</tool_call> x",
        "content": "<tool_call>that is a tag</tool_call> x",
    },
    {
        "case": "truncated",
        "text": "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Os",
        "calls": (("get_weather", '{"city": "Os'),),
        "reason": FinishReason.LENGTH,
    },
    special=("<tool_call>", "</tool_call>", "<think>", "</think>"),
)


def _minimax(*calls: str) -> str:
    return (
        "<minimax:tool_call>\n"
        + "\n".join(f"<invoke name={call}\n</invoke>" for call in calls)
        + "\n</minimax:tool_call>"
    )


MINIMAX = family(
    "minimax_m2",
    {"case": "plain", "text": '<invoke name="now">', "content": '<invoke name="now">'},
    {
        "case": "reasoning",
        "prompt": "]~b]ai\n<think>\n",
        "text": "Hm.\n</think>\n\nHello.",
        "reasoning": "Hm.",
        "content": "Hello.",
    },
    {
        "case": "one call",
        "text": _minimax('"get_weather">\n<parameter name="city">Oslo</parameter>'),
        "calls": (("get_weather", CITY),),
    },
    {
        "case": "parallel calls, with text before",
        "text": "I look.\n" + _minimax('"now">', '"get_weather">\n<parameter name="days">3</parameter>'),
        "content": "I look.",
        "calls": (("now", {}), ("get_weather", {"days": 3})),
    },
    {
        "case": "hard arguments",
        "text": _minimax(
            '"get_weather">\n<parameter name="city">' + HARD["city"] + "</parameter>\n"
            '<parameter name="where">{"at": [1, {"x": null}], "b": true}</parameter>'
        ),
        "calls": (("get_weather", HARD),),
    },
    {
        "case": "no call",
        "text": "<minimax:tool_call>\n<invoke now>\n</minimax:tool_call> x",
        "content": "<minimax:tool_call>\n<invoke now>\n</minimax:tool_call> x",
    },
    {
        "case": "truncated",
        "text": '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Os',
        "calls": (("get_weather", '{"city": "Os'),),
        "reason": FinishReason.LENGTH,
    },
    special=("<minimax:tool_call>", "</minimax:tool_call>", "<think>", "</think>"),
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

_DEEPSEEK_TOKENS = tuple(f"<｜tool▁{name}｜>" for name in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep"))
_BEGIN, _END, _CALL, _CALL_END, _SEP = _DEEPSEEK_TOKENS


def _v3(name: str, arguments: str) -> str:
    return f"{_CALL}function{_SEP}{name}\n```json\n{arguments}\n```{_CALL_END}"


DEEPSEEK_V3 = family(
    "deepseek_v3",
    {"case": "plain", "text": "```json\n{}\n```", "content": "```json\n{}\n```"},
    {"case": "reasoning", "text": "<think>\nHm.\n</think>\n\nHello.", "reasoning": "Hm.", "content": "Hello."},
    {
        "case": "one call",
        "text": _BEGIN + _v3("get_weather", '{"city": "Oslo"}') + _END,
        "calls": (("get_weather", CITY),),
    },
    {
        "case": "parallel calls",
        "text": _BEGIN + _v3("get_weather", '{"city": "Oslo"}') + "\n" + _v3("now", "{}") + _END,
        "calls": (("get_weather", CITY), ("now", {})),
    },
    {
        "case": "text before",
        "text": "I look.\n\n" + _BEGIN + _v3("now", "{}") + _END,
        "content": "I look.",
        "calls": (("now", {}),),
    },
    {
        "case": "hard arguments",
        "text": _BEGIN + _v3("get_weather", HARD_JSON) + _END,
        "calls": (("get_weather", HARD),),
    },
    {
        "case": "delimiters in arguments",
        "text": _BEGIN + _v3("now", '{"a": "```' + _CALL_END + '"}') + _END,
        "calls": (("now", {"a": "```" + _CALL_END}),),
    },
    {"case": "no call", "text": f"{_BEGIN}function now{_END} x", "content": f"{_BEGIN}function now{_END} x"},
    {
        "case": "malformed arguments",
        "text": _BEGIN + _v3("now", '{"a" 1}') + "\n" + _v3("now", "{}") + _END,
        "calls": (("now", '{"a" 1}\n```'), ("now", {})),
    },
    {
        "case": "truncated",
        "text": _BEGIN + _v3("now", '{"a": 1')[: -len(_CALL_END) - 4],
        "calls": (("now", '{"a": 1'),),
        "reason": FinishReason.LENGTH,
    },
    special=(*_DEEPSEEK_TOKENS, "<think>", "</think>"),
)


def _v31(name: str, arguments: str) -> str:
    return f"{_CALL}{name}{_SEP}{arguments}{_CALL_END}"


DEEPSEEK_V31 = family(
    "deepseek_v31",
    {"case": "plain", "text": "Hello.", "content": "Hello."},
    {
        "case": "reasoning that the prompt opens",
        "prompt": "<｜User｜>x<｜Assistant｜><think>",
        "text": "Hm.</think>Hello.",
        "reasoning": "Hm.",
        "content": "Hello.",
    },
    {
        "case": "one call",
        "text": _BEGIN + _v31("get_weather", '{"city": "Oslo"}') + _END,
        "calls": (("get_weather", CITY),),
    },
    {
        "case": "parallel calls",
        "text": _BEGIN + _v31("get_weather", '{"city": "Oslo"}') + _v31("now", "{}") + _END,
        "calls": (("get_weather", CITY), ("now", {})),
    },
    {
        "case": "text before",
        "text": "I look." + _BEGIN + _v31("now", "{}") + _END,
        "content": "I look.",
        "calls": (("now", {}),),
    },
    {
        "case": "hard arguments",
        "text": _BEGIN + _v31("get_weather", HARD_JSON) + _END,
        "calls": (("get_weather", HARD),),
    },
    {"case": "no call", "text": f"{_BEGIN}{_CALL}{_SEP}{{}}{_END}", "content": f"{_BEGIN}{_CALL}{_SEP}{{}}{_END}"},
    {
        "case": "truncated",
        "text": _BEGIN + _CALL + "now" + _SEP + '{"a": [',
        "calls": (("now", '{"a": ['),),
        "reason": FinishReason.LENGTH,
    },
    special=(*_DEEPSEEK_TOKENS, "<think>", "</think>"),
)

_ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"


def _harmony(name: str, arguments: str) -> str:
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}<|call|>"


GPT_OSS = family(
    "gpt_oss",
    {"case": "plain", "text": "<|channel|>final<|message|>Hello.<|return|>", "content": "Hello."},
    {
        "case": "reasoning",
        "text": _ANALYSIS + "<|channel|>final<|message|>Hello.",
        "reasoning": "Hm.",
        "content": "Hello.",
    },
    {
        "case": "one call",
        "text": _ANALYSIS + _harmony("get_weather", '{"city": "Oslo"}'),
        "reasoning": "Hm.",
        "calls": (("get_weather", CITY),),
    },
    {
        "case": "parallel calls",
        "text": _harmony("get_weather", '{"city": "Oslo"}') + "<|start|>assistant" + _harmony("now", ""),
        "calls": (("get_weather", CITY), ("now", {})),
    },
    {
        "case": "preamble",
        "text": "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant" + _harmony("now", "{}"),
        "content": "I look.",
        "calls": (("now", {}),),
    },
    {
        "case": "recipient before the channel",
        "text": " to=functions.now<|channel|>analysis json<|message|>{}<|call|>",
        "calls": (("now", {}),),
    },
    {"case": "hard arguments", "text": _harmony("get_weather", HARD_JSON), "calls": (("get_weather", HARD),)},
    {
        "case": "built-in tool",
        "text": "<|channel|>commentary to=python code<|message|>1 + 1<|call|>",
        "reasoning": "1 + 1",
    },
    {"case": "no call", "text": _harmony("now", "soon"), "content": _harmony("now", "soon")},
    {
        "case": "malformed arguments",
        "text": _harmony("now", '{"a": tru}'),
        "calls": (("now", '{"a": tru}'),),
    },
    {
        "case": "truncated",
        "text": _harmony("now", '{"a": "b')[: -len("<|call|>")],
        "calls": (("now", '{"a": "b'),),
        "reason": FinishReason.LENGTH,
    },
    {"case": "truncated header", "text": "<|channel|>comm", "reason": FinishReason.LENGTH},
    {"case": "no channel", "text": "Hello.", "prompt": "", "content": "Hello."},
    {
        "case": "prompt begins the reasoning",
        "prompt": "<|start|>assistant<|channel|>analysis<|message|>So",
        "text": " far.<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
        "reasoning": " far.",
        "content": "Yes.",
    },
    prompt="<|start|>user<|message|>x<|end|><|start|>assistant",
    special=("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>"),
)


def _gemma_family(name: str, begin: str, end: str, quote: str, *more: dict[str, Any]) -> list[Transcript]:
    city = f"{begin}call:get_weather{{city:{quote}Oslo{quote}}}{end}"
    now = f"{begin}call:now{{}}{end}"
    hard = f"{{city:{quote}{HARD['city']}{quote},where:{{at:[1,{{x:null}}],b:true}}}}"
    return family(
        name,
        {"case": "plain", "text": "Hello {a:1}.", "content": "Hello {a:1}."},
        {"case": "one call", "text": city, "calls": (("get_weather", CITY),)},
        {"case": "parallel calls", "text": city + now, "calls": (("get_weather", CITY), ("now", {}))},
        {"case": "text before", "text": "I look.\n" + now, "content": "I look.", "calls": (("now", {}),)},
        {"case": "hard arguments", "text": f"{begin}call:get_weather{hard}{end}", "calls": (("get_weather", HARD),)},
        {
            "case": "delimiters in arguments",
            "text": f'{begin}call:now{{a:{quote}{end}}}{quote},"b":"c"}}{end}',
            "calls": (("now", {"a": end + "}", "b": "c"}),),
        },
        {"case": "no call", "text": f"{begin}call now{end} x", "content": f"{begin}call now{end} x"},
        {"case": "malformed arguments", "text": f"{begin}call:now{{a:b}}{end}", "calls": (("now", '{"a":b}'),)},
        {
            "case": "truncated",
            "text": f"{begin}call:now{{a:{quote}b",
            "calls": (("now", '{"a":"b'),),
            "reason": FinishReason.LENGTH,
        },
        *more,
        special=(begin, end, quote, "<|channel>", "<channel|>"),
    )


GEMMA4 = _gemma_family(
    "gemma4",
    "<|tool_call>",
    "<tool_call|>",
    '<|"|>',
    {
        "case": "reasoning",
        "text": "<|channel>thought\nHm.\n<channel|>Hello.",
        "reasoning": "Hm.",
        "content": "Hello.",
    },
    {
        "case": "prompt closes the reasoning",
        "prompt": "<|turn>model\n<|channel>thought\n<channel|>",
        "text": "Hello.",
        "content": "Hello.",
    },
)
FUNCTION_GEMMA = _gemma_family("functiongemma", "<start_function_call>", "<end_function_call>", "<escape>")

TRANSCRIPTS = [
    *HERMES,
    *QWEN3_CODER,
    *GLM,
    *MINIMAX,
    *MISTRAL,
    *LLAMA,
    *DEEPSEEK_V3,
    *DEEPSEEK_V31,
    *GPT_OSS,
    *GEMMA4,
    *FUNCTION_GEMMA,
]
