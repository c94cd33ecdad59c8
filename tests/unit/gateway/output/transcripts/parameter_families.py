"""Transcripts of families that write each parameter between delimiters."""

from baton.core.request import FinishReason
from tests.unit.gateway.output.transcripts.transcript import CITY, HARD, family

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
        "case": "a call ends the reasoning",
        "prompt": "<|im_start|>assistant\n<think>\n",
        "text": "I could write <tool_call> or\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        "reasoning": "I could write <tool_call> or",
        "calls": (("now", {}),),
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

SEED_OSS = family(
    "seed_oss",
    {"case": "plain", "text": "a <function=x> b", "content": "a <function=x> b"},
    {
        "case": "reasoning",
        "text": "<seed:think>Hm.</seed:think>\nHello.",
        "reasoning": "Hm.",
        "content": "Hello.",
    },
    {
        "case": "parallel calls, with text before",
        "text": "I look.\n<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>\n<seed:tool_call>\n"
        "<function=get_weather>\n<parameter=city>Oslo</parameter>\n<parameter=days>3</parameter>\n</function>\n"
        "</seed:tool_call>",
        "content": "I look.",
        "calls": (("now", {}), ("get_weather", {"city": "Oslo", "days": 3})),
    },
    {
        "case": "hard arguments",
        "text": "<seed:tool_call>\n<function=get_weather>\n<parameter=city>" + HARD["city"] + "</parameter>\n"
        '<parameter=where>{"at": [1, {"x": null}], "b": true}</parameter>\n</function>\n</seed:tool_call>',
        "calls": (("get_weather", HARD),),
    },
    {
        "case": "truncated",
        "text": "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Os",
        "calls": (("get_weather", '{"city": "Os'),),
        "reason": FinishReason.LENGTH,
    },
    special=("<seed:tool_call>", "</seed:tool_call>", "<seed:think>", "</seed:think>"),
)


def _dsml(*calls: str) -> str:
    return (
        "<｜DSML｜function_calls>\n"
        + "\n".join(f"<｜DSML｜invoke name={call}\n</｜DSML｜invoke>" for call in calls)
        + "\n</｜DSML｜function_calls>"
    )


def _dsml_value(name: str, value: str, *, string: bool) -> str:
    return f'\n<｜DSML｜parameter name="{name}" string="{"true" if string else "false"}">{value}</｜DSML｜parameter>'


DEEPSEEK_V32 = family(
    "deepseek_v32",
    {"case": "plain", "text": "a <｜DSML｜ b", "content": "a <｜DSML｜ b"},
    {
        "case": "reasoning that the prompt opens",
        "prompt": "<｜User｜>x<｜Assistant｜><think>",
        "text": "Hm.</think>Hello.",
        "reasoning": "Hm.",
        "content": "Hello.",
    },
    {
        "case": "one call",
        "text": _dsml('"get_weather">' + _dsml_value("city", "Oslo", string=True)),
        "calls": (("get_weather", CITY),),
    },
    {
        "case": "parallel calls, with text before",
        "text": "I look.\n\n" + _dsml('"now">', '"get_weather">' + _dsml_value("days", "3", string=False)),
        "content": "I look.",
        "calls": (("now", {}), ("get_weather", {"days": 3})),
    },
    {
        "case": "hard arguments",
        "text": _dsml(
            '"get_weather">'
            + _dsml_value("city", HARD["city"], string=True)
            + _dsml_value("where", '{"at": [1, {"x": null}], "b": true}', string=False)
        ),
        "calls": (("get_weather", HARD),),
    },
    {
        "case": "the mark tells the type and not the schema",
        "text": _dsml(
            '"get_weather">' + _dsml_value("days", "3", string=True) + _dsml_value("city", "[4]", string=False)
        ),
        "calls": (("get_weather", {"days": "3", "city": [4]}),),
    },
    {
        "case": "no call",
        "text": "<｜DSML｜function_calls>\n<｜DSML｜invoke now>\n</｜DSML｜function_calls> x",
        "content": "<｜DSML｜function_calls>\n<｜DSML｜invoke now>\n</｜DSML｜function_calls> x",
    },
    {
        "case": "truncated",
        "text": _dsml('"get_weather">' + _dsml_value("city", "Os", string=True)).partition("Os")[0] + "Os",
        "calls": (("get_weather", '{"city": "Os'),),
        "reason": FinishReason.LENGTH,
    },
    special=("｜DSML｜", "<think>", "</think>"),
)
DEEPSEEK_V4 = family(
    "deepseek_v4",
    {
        "case": "parallel calls",
        "text": _dsml('"now">', '"get_weather">' + _dsml_value("city", "Oslo", string=True)).replace(
            "function_calls>", "tool_calls>"
        ),
        "calls": (("now", {}), ("get_weather", CITY)),
    },
    special=("｜DSML｜",),
)
GLM47 = family(
    "glm47",
    {
        "case": "parallel calls",
        "text": "<think>Hm.</think><tool_call>now</tool_call><tool_call>get_weather<arg_key>days</arg_key>"
        "<arg_value>3</arg_value></tool_call>",
        "reasoning": "Hm.",
        "calls": (("now", {}), ("get_weather", {"days": 3})),
    },
    special=("<tool_call>", "</tool_call>", "<think>", "</think>", "<arg_key>", "</arg_key>"),
)
