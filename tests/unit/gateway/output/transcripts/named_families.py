"""Transcripts of families that write a name and a JSON object, or messages with headers."""

from typing import Any

from baton.core.request import FinishReason
from tests.unit.gateway.output.transcripts.transcript import CITY, HARD, HARD_JSON, Transcript, family

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


def _kimi(*calls: str) -> str:
    inner = "".join(f"<|tool_call_begin|>{call}<|tool_call_end|>" for call in calls)
    return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"


_ARGUMENT = "<|tool_call_argument_begin|>"
KIMI_K2 = family(
    "kimi_k2",
    {"case": "plain", "text": "functions.now:0 {}", "content": "functions.now:0 {}"},
    {"case": "reasoning", "text": "<think>Hm.</think>Hello.", "reasoning": "Hm.", "content": "Hello."},
    {
        "case": "one call",
        "text": _kimi(f'functions.get_weather:0{_ARGUMENT}{{"city": "Oslo"}}'),
        "calls": (("get_weather", CITY),),
    },
    {
        "case": "parallel calls, with text before and whitespace",
        "text": "I look. "
        + _kimi(f'\nfunctions.get_weather:0 {_ARGUMENT}\n{{"city": "Oslo"}}\n', f"now:1{_ARGUMENT}{{}}"),
        "content": "I look.",
        "calls": (("get_weather", CITY), ("now", {})),
    },
    {
        "case": "hard arguments",
        "text": _kimi(f"functions.get_weather:12{_ARGUMENT}{HARD_JSON}"),
        "calls": (("get_weather", HARD),),
    },
    {
        "case": "a call ends the reasoning",
        "text": "<think>I look." + _kimi(f"functions.now:0{_ARGUMENT}{{}}"),
        "reasoning": "I look.",
        "calls": (("now", {}),),
    },
    {"case": "no call", "text": _kimi(f":0{_ARGUMENT}{{}}"), "content": _kimi(f":0{_ARGUMENT}{{}}")},
    {
        "case": "truncated",
        "text": f'<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0{_ARGUMENT}{{"a": [',
        "calls": (("now", '{"a": ['),),
        "reason": FinishReason.LENGTH,
    },
    special=(
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        "<think>",
        "</think>",
    ),
)
