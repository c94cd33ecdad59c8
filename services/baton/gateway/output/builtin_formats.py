"""Built-in formats of reasoning and tool calls, by the names for `--tool-parser` and `--reasoning-parser`.

The texts are those that the families' published chat templates write. The parser accepts other whitespace
between delimiters.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from baton.gateway.output.formats import CallLayout, CallSyntax, ParameterSyntax, ReasoningFormat, ToolFormat

HERMES = ToolFormat(
    name="hermes",
    layout=CallLayout.JSON_OBJECT,
    triggers=("<tool_call>",),
    close="</tool_call>",
    syntax=CallSyntax(
        before_name='<tool_call>\n{"name": "',
        after_name='", "arguments": ',
        after_arguments="}\n</tool_call>",
        separator="\n",
    ),
)
QWEN3_CODER = ToolFormat(
    name="qwen3_coder",
    layout=CallLayout.PARAMETERS,
    triggers=("<tool_call>", "<function="),
    close="</tool_call>",
    ends_reasoning=True,
    syntax=CallSyntax(
        before_name="<tool_call>\n<function=",
        after_name=">\n",
        after_arguments="</function>\n</tool_call>",
        separator="\n",
        parameters=ParameterSyntax(before_key="<parameter=", after_key=">\n", after_value="\n</parameter>\n"),
    ),
)
GLM45 = ToolFormat(
    name="glm45",
    layout=CallLayout.PARAMETERS,
    triggers=("<tool_call>",),
    close="</tool_call>",
    syntax=CallSyntax(
        before_name="<tool_call>",
        after_name="\n",
        after_arguments="</tool_call>",
        separator="\n",
        parameters=ParameterSyntax(
            before_key="<arg_key>",
            after_key="</arg_key>\n<arg_value>",
            after_value="</arg_value>\n",
            untyped_json=True,
        ),
    ),
)
GLM47 = ToolFormat(
    name="glm47",
    layout=CallLayout.PARAMETERS,
    triggers=("<tool_call>",),
    close="</tool_call>",
    syntax=CallSyntax(
        before_name="<tool_call>",
        after_name="",
        after_arguments="</tool_call>",
        parameters=ParameterSyntax(
            before_key="<arg_key>",
            after_key="</arg_key><arg_value>",
            after_value="</arg_value>",
            untyped_json=True,
        ),
    ),
)
SEED_OSS = ToolFormat(
    name="seed_oss",
    layout=CallLayout.PARAMETERS,
    triggers=("<seed:tool_call>",),
    close="</seed:tool_call>",
    syntax=CallSyntax(
        before_name="<seed:tool_call>\n<function=",
        after_name=">\n",
        after_arguments="</function>\n</seed:tool_call>",
        separator="\n",
        parameters=ParameterSyntax(before_key="<parameter=", after_key=">", after_value="</parameter>\n"),
    ),
)
MINIMAX_M2 = ToolFormat(
    name="minimax_m2",
    layout=CallLayout.PARAMETERS,
    triggers=("<minimax:tool_call>",),
    close="</minimax:tool_call>",
    syntax=CallSyntax(
        section_begin="<minimax:tool_call>\n",
        before_name='<invoke name="',
        after_name='">\n',
        after_arguments="</invoke>\n",
        section_end="</minimax:tool_call>",
        parameters=ParameterSyntax(
            before_key='<parameter name="', after_key='">', after_value="</parameter>\n", untyped_json=True
        ),
    ),
)
MISTRAL_LIST = ToolFormat(
    name="mistral_list",
    layout=CallLayout.JSON_OBJECT,
    triggers=("[TOOL_CALLS]",),
    close="",
    short_ids=True,
    syntax=CallSyntax(
        section_begin="[TOOL_CALLS][",
        before_name='{"name": "',
        after_name='", "arguments": ',
        after_arguments="}",
        separator=", ",
        section_end="]",
    ),
)
MISTRAL = ToolFormat(
    name="mistral",
    layout=CallLayout.NAME_AND_JSON,
    triggers=("[TOOL_CALLS]",),
    close="",
    id_delimiter="[CALL_ID]",
    short_ids=True,
    syntax=CallSyntax(before_name="[TOOL_CALLS]", after_name="[ARGS]", after_arguments=""),
)
GRANITE = ToolFormat(
    name="granite",
    layout=CallLayout.JSON_OBJECT,
    triggers=("<|tool_call|>",),
    close="",
    syntax=CallSyntax(
        section_begin="<|tool_call|>[",
        before_name='{"name": "',
        after_name='", "arguments": ',
        after_arguments="}",
        separator=", ",
        section_end="]",
    ),
)
PHI4_MINI = ToolFormat(
    name="phi4_mini_json",
    layout=CallLayout.JSON_OBJECT,
    triggers=("functools", "<|tool_call|>"),
    close="",
    syntax=CallSyntax(
        section_begin="functools[",
        before_name='{"name": "',
        after_name='", "arguments": ',
        after_arguments="}",
        separator=", ",
        section_end="]",
    ),
)
JAMBA = ToolFormat(
    name="jamba",
    layout=CallLayout.JSON_OBJECT,
    triggers=("<tool_calls>",),
    close="</tool_calls>",
    syntax=CallSyntax(
        section_begin="<tool_calls>[",
        before_name='{"name": "',
        after_name='", "arguments": ',
        after_arguments="}",
        separator=", ",
        section_end="]</tool_calls>",
    ),
)
NEMOTRON = ToolFormat(
    name="nemotron_json",
    layout=CallLayout.JSON_OBJECT,
    triggers=("<TOOLCALL>",),
    close="</TOOLCALL>",
    syntax=CallSyntax(
        section_begin="<TOOLCALL>[",
        before_name='{"name": "',
        after_name='", "arguments": ',
        after_arguments="}",
        separator=", ",
        section_end="]</TOOLCALL>",
    ),
)
LLAMA3_JSON = ToolFormat(
    name="llama3_json",
    layout=CallLayout.JSON_OBJECT,
    triggers=("<|python_tag|>",),
    close="",
    bare=True,
    syntax=CallSyntax(before_name='{"name": "', after_name='", "parameters": ', after_arguments="}", separator="; "),
)
DEEPSEEK_V3 = ToolFormat(
    name="deepseek_v3",
    layout=CallLayout.NAME_AND_JSON,
    triggers=("<｜tool▁calls▁begin｜>",),
    close="<｜tool▁calls▁end｜>",
    syntax=CallSyntax(
        section_begin="<｜tool▁calls▁begin｜>",
        before_name="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        after_name="\n```json\n",
        after_arguments="\n```<｜tool▁call▁end｜>",
        separator="\n",
        section_end="<｜tool▁calls▁end｜>",
    ),
)
DEEPSEEK_V31 = ToolFormat(
    name="deepseek_v31",
    layout=CallLayout.NAME_AND_JSON,
    triggers=("<｜tool▁calls▁begin｜>",),
    close="<｜tool▁calls▁end｜>",
    syntax=CallSyntax(
        section_begin="<｜tool▁calls▁begin｜>",
        before_name="<｜tool▁call▁begin｜>",
        after_name="<｜tool▁sep｜>",
        after_arguments="<｜tool▁call▁end｜>",
        section_end="<｜tool▁calls▁end｜>",
    ),
)
_DSML_CALL = CallSyntax(
    section_begin="<｜DSML｜function_calls>\n",
    before_name='<｜DSML｜invoke name="',
    after_name='">\n',
    after_arguments="</｜DSML｜invoke>\n",
    section_end="</｜DSML｜function_calls>",
    parameters=ParameterSyntax(
        before_key='<｜DSML｜parameter name="',
        after_key='" string="false">',
        after_string_key='" string="true">',
        after_value="</｜DSML｜parameter>\n",
        untyped_json=True,
    ),
)
DEEPSEEK_V32 = ToolFormat(
    name="deepseek_v32",
    layout=CallLayout.PARAMETERS,
    triggers=("<｜DSML｜function_calls>",),
    close="</｜DSML｜function_calls>",
    syntax=_DSML_CALL,
)
DEEPSEEK_V4 = ToolFormat(
    name="deepseek_v4",
    layout=CallLayout.PARAMETERS,
    triggers=("<｜DSML｜tool_calls>",),
    close="</｜DSML｜tool_calls>",
    syntax=replace(_DSML_CALL, section_begin="<｜DSML｜tool_calls>\n", section_end="</｜DSML｜tool_calls>"),
)
KIMI_K2 = ToolFormat(
    name="kimi_k2",
    layout=CallLayout.NAME_AND_JSON,
    triggers=("<|tool_calls_section_begin|>",),
    close="<|tool_calls_section_end|>",
    id_prefix="functions.",
    ends_reasoning=True,
    syntax=CallSyntax(
        section_begin="<|tool_calls_section_begin|>",
        before_name="<|tool_call_begin|>",
        after_name="<|tool_call_argument_begin|>",
        after_arguments="<|tool_call_end|>",
        section_end="<|tool_calls_section_end|>",
    ),
)
GPT_OSS = ToolFormat(
    name="gpt_oss",
    layout=CallLayout.HARMONY,
    triggers=("<|channel|>commentary to=",),
    close="<|call|>",
    syntax=CallSyntax(
        before_name="<|channel|>commentary to=functions.",
        after_name=" <|constrain|>json<|message|>",
        after_arguments="<|call|>",
        separator="<|start|>assistant",
    ),
)
GEMMA4 = ToolFormat(
    name="gemma4",
    layout=CallLayout.GEMMA,
    triggers=("<|tool_call>",),
    close="<tool_call|>",
    syntax=CallSyntax(
        before_name="<|tool_call>call:", after_name="", after_arguments="<tool_call|>", string_delimiter='<|"|>'
    ),
)
FUNCTION_GEMMA = ToolFormat(
    name="functiongemma",
    layout=CallLayout.GEMMA,
    triggers=("<start_function_call>",),
    close="<end_function_call>",
    syntax=CallSyntax(
        before_name="<start_function_call>call:",
        after_name="",
        after_arguments="<end_function_call>",
        string_delimiter="<escape>",
    ),
)

THINK = ReasoningFormat(name="qwen3", open="<think>", close="</think>")
DEEPSEEK_R1 = ReasoningFormat(name="deepseek_r1", open="<think>", close="</think>", always_open=True)
MAGISTRAL = ReasoningFormat(name="mistral", open="[THINK]", close="[/THINK]")
GEMMA4_THOUGHT = ReasoningFormat(name="gemma4", open="<|channel>thought\n", close="<channel|>")
SEED_THINK = ReasoningFormat(name="seed_oss", open="<seed:think>", close="</seed:think>")
HARMONY_ANALYSIS = ReasoningFormat(
    name="gpt_oss", open="<|channel|>analysis<|message|>", close="<|end|>", is_harmony=True
)

TOOL_FORMATS: Mapping[str, ToolFormat | None] = MappingProxyType(
    {
        "none": None,
        "hermes": HERMES,
        "qwen3": HERMES,
        "granite4": HERMES,
        "qwen3_coder": QWEN3_CODER,
        "qwen3_xml": QWEN3_CODER,
        "mistral": MISTRAL,
        "mistral_list": MISTRAL_LIST,
        "llama3_json": LLAMA3_JSON,
        "llama4_json": LLAMA3_JSON,
        "glm45": GLM45,
        "glm47": GLM47,
        "minimax_m2": MINIMAX_M2,
        "seed_oss": SEED_OSS,
        "deepseek_v3": DEEPSEEK_V3,
        "deepseek_r1": DEEPSEEK_V3,
        "deepseek_v31": DEEPSEEK_V31,
        "deepseek_v32": DEEPSEEK_V32,
        "deepseek_v4": DEEPSEEK_V4,
        "kimi_k2": KIMI_K2,
        "openai": GPT_OSS,
        "gpt_oss": GPT_OSS,
        "gemma4": GEMMA4,
        "functiongemma": FUNCTION_GEMMA,
        "granite": GRANITE,
        "phi4_mini_json": PHI4_MINI,
        "jamba": JAMBA,
        "hunyuan_a13b": JAMBA,
        "nemotron_json": NEMOTRON,
    }
)
"""Formats of tool calls by name. Several names stand for one format, as in vLLM."""

REASONING_FORMATS: Mapping[str, ReasoningFormat | None] = MappingProxyType(
    {
        "none": None,
        "qwen3": THINK,
        "deepseek_r1": DEEPSEEK_R1,
        "deepseek_v3": THINK,
        "deepseek_v31": THINK,
        "deepseek_v32": THINK,
        "deepseek_v4": THINK,
        "glm45": THINK,
        "minimax_m2": THINK,
        "kimi_k2": THINK,
        "nemotron_v3": THINK,
        "olmo3": THINK,
        "seed_oss": SEED_THINK,
        "gpt_oss": HARMONY_ANALYSIS,
        "openai_gptoss": HARMONY_ANALYSIS,
        "mistral": MAGISTRAL,
        "gemma4": GEMMA4_THOUGHT,
    }
)
"""Formats of reasoning by name."""
