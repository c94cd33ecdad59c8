"""Chat templates of the model families, condensed, against the rendering of transformers."""

from collections.abc import Callable
from datetime import datetime
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from baton.core.errors import Refused
from baton.gateway.input.chat.chat_request import parse_chat
from baton.gateway.input.ignored_fields import UnknownFields
from baton.gateway.text.chat_prompt import ChatPrompt
from baton.gateway.text.chat_template import ChatTemplate
from baton.gateway.text.template_style import TemplateStyle, short_id

TEMPLATES = Path(__file__).parents[2] / "data" / "chat_templates"
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "weather of a “city” & <more>",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "array", "items": {"type": "integer"}}},
            "required": ["city"],
        },
    },
}
ARGUMENTS = '{"city": "Zürich <1>", "days": [1, 2], "wet": true}'
CALL = {"id": "call_abcdef0123456789", "type": "function", "function": {"name": "get_weather", "arguments": ARGUMENTS}}
RESULT = {"role": "tool", "tool_call_id": CALL["id"], "content": "17 °C\n"}
SYSTEM = {"role": "system", "content": " Be brief. "}
USER = {"role": "user", "content": "How is the weather?"}
CHATS: dict[str, list[dict[str, Any]]] = {
    "question": [USER],
    "history": [
        SYSTEM,
        USER,
        {"role": "assistant", "content": "<think>hm</think>\n\nFine.", "reasoning_content": "so"},
        USER,
    ],
    "call": [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, RESULT],
    "call with text": [
        SYSTEM,
        USER,
        {"role": "assistant", "content": "I look.", "reasoning": "a call", "tool_calls": [CALL]},
        RESULT,
        {"role": "assistant", "content": "It is warm."},
        USER,
    ],
}
FAMILIES = sorted(file.stem for file in TEMPLATES.glob("*.jinja"))
VARIABLES: list[dict[str, Any]] = [{}, {"chat_template_kwargs": {"enable_thinking": False, "thinking": True}}]


def still_clock() -> float:
    return 0.0


@cache
def template_of(family: str, now: Callable[[], datetime] = datetime.now) -> ChatTemplate:
    source = (TEMPLATES / f"{family}.jinja").read_text("utf-8")
    return ChatTemplate(source, TOKENS, now=now).find_style(still_clock, 1.0)


def expected(template: ChatTemplate, prompt: ChatPrompt) -> str:
    """Render with transformers, which gets the messages in the form that the template expects."""
    (text,), _ = render_jinja_template(
        [template.style.adapted(prompt.messages)],
        tools=None if prompt.tools is None else list(prompt.tools),
        documents=None if prompt.documents is None else list(prompt.documents),
        chat_template=template.source,
        add_generation_prompt=prompt.add_generation_prompt,
        continue_final_message=prompt.continue_final_message,
        **{**TOKENS, **prompt.variables},
    )
    return text


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_equal_those_of_transformers(family: str) -> None:
    template = template_of(family)
    for chat, tools, variables, begins in product(CHATS.values(), (None, [WEATHER]), VARIABLES, (True, False)):
        body = {"messages": chat, "tools": tools, "add_generation_prompt": begins, **variables}
        prompt = parse_chat(body, UnknownFields()).prompt
        text = template.render(prompt, still_clock)
        assert text == expected(template, prompt)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_continued_message_ends_where_that_of_transformers_ends(family: str) -> None:
    template = template_of(family)
    for ending in ("It is", "It is  ", "It\n"):
        chat = [USER, {"role": "assistant", "content": ending}]
        prompt = parse_chat({"messages": chat, "continue_final_message": True}, UnknownFields()).prompt
        text = template.render(prompt, still_clock)
        assert text == expected(template, prompt)
        assert text.rstrip().endswith(ending.rstrip())


PARTS = """{% for message in messages %}<{{ message.role }}>{% for part in message.content %}\
{% if part.type == "text" %}{{ part.text }}{% else %}<image>{% endif %}{% endfor %}
{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""
PARTS_WITHOUT_CHECK = PARTS.replace(
    "{% for part in message.content %}", "{{ message.content[0]['text'] }}{% for part in [] %}"
)


@pytest.mark.parametrize("source", [PARTS, PARTS_WITHOUT_CHECK])
def test_template_that_reads_lists_of_parts_gets_them(source: str) -> None:
    template = ChatTemplate(source, TOKENS).find_style(still_clock, 1.0)
    assert template.style == TemplateStyle(content_as_parts=True)
    for fields in ({}, {"continue_final_message": True}):
        chat = [{"role": "system", "content": "Be brief."}, USER, {"role": "assistant", "content": "It is"}]
        prompt = parse_chat({"messages": chat, **fields}, UnknownFields()).prompt
        text = template.render(prompt, still_clock)
        assert text == expected(template, prompt)
        assert "<system>Be brief." in text
        assert f"<user>{USER['content']}" in text


@pytest.mark.parametrize(
    ("family", "style", "shown"),
    [
        ("qwen3", TemplateStyle(), '"arguments": {"city": "Zürich <1>", "days": [1, 2], "wet": true}}'),
        ("hermes", TemplateStyle(), '"arguments": {"city": "Zürich <1>", "days": [1, 2], "wet": true}}'),
        ("llama31", TemplateStyle(), '"parameters": {"city": "Zürich <1>", "days": [1, 2], "wet": true}}'),
        ("mistral", TemplateStyle(short_ids=True), f'"id": "{short_id(CALL["id"])}"}}]'),
        ("glm", TemplateStyle(), "<arg_key>city</arg_key>\n<arg_value>Zürich <1></arg_value>"),
        (
            "deepseek",
            TemplateStyle(arguments_as_text=True),
            f"<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜>",
        ),
        (
            "gpt_oss",
            TemplateStyle(knows_developer=True, content_excludes_thinking=True),
            'commentary json<|message|>{"city": "Zürich <1>", "days": [1, 2], "wet": true}<|call|>',
        ),
        (
            "gemma",
            TemplateStyle(knows_developer=True),
            'call:get_weather{city:<|"|>Zürich <1><|"|>,days:[1,2],wet:true}',
        ),
        ("training", TemplateStyle(), "17 °C"),
    ],
)
def test_messages_get_the_form_that_the_template_expects(family: str, style: TemplateStyle, shown: str) -> None:
    template = template_of(family)
    assert template.style == style
    for chat in ("call", "call with text"):
        text = template.render(
            parse_chat({"messages": CHATS[chat], "tools": [WEATHER]}, UnknownFields()).prompt, still_clock
        )
        assert shown in text
        assert "None" not in text
        assert "17 °C" in text


def test_arguments_that_are_no_json_object_stay_text() -> None:
    broken = {**CALL, "function": {"name": "get_weather", "arguments": '{"city": '}}
    chat = [USER, {"role": "assistant", "content": None, "tool_calls": [broken]}, RESULT]
    for family, shown in (("qwen3", '"arguments": {"city": }'), ("deepseek", '<｜tool▁sep｜>{"city": <')):
        assert shown in template_of(family).render(parse_chat({"messages": chat}, UnknownFields()).prompt, still_clock)
    with pytest.raises(Refused, match="does not accept this chat"):
        template_of("glm").render(parse_chat({"messages": chat}, UnknownFields()).prompt, still_clock)


def test_developer_is_system_unless_the_template_knows_it() -> None:
    chat = [{"role": "developer", "content": "Be brief."}, USER]
    assert "<|im_start|>system\nBe brief." in template_of("qwen3").render(
        parse_chat({"messages": chat}, UnknownFields()).prompt, still_clock
    )
    assert "# Instructions\n\nBe brief." in template_of("gpt_oss").render(
        parse_chat({"messages": chat}, UnknownFields()).prompt, still_clock
    )


def test_reasoning_effort_and_the_date_reach_the_template() -> None:
    body = {"messages": [USER], "reasoning_effort": "low"}
    text = template_of("gpt_oss", now=lambda: datetime(2031, 2, 3)).render(
        parse_chat(body, UnknownFields()).prompt, still_clock
    )
    assert "Current date: 2031-02-03\n\nReasoning: low" in text
    off = parse_chat(body | {"reasoning_effort": "none"}, UnknownFields()).prompt
    assert template_of("qwen3").render(off, still_clock).endswith("<think>\n\n</think>\n\n")


def test_documents_reach_the_template() -> None:
    body = {"messages": [USER], "documents": [{"title": "a", "text": "x"}, {"title": "b", "text": "y"}]}
    template = template_of("training")
    assert "a, ball of 2" in template.render(parse_chat(body, UnknownFields()).prompt, still_clock)
    assert (template.uses_documents, template.uses_tools) == (True, False)
    assert [template_of(family).uses_tools for family in FAMILIES] == [family != "training" for family in FAMILIES]
