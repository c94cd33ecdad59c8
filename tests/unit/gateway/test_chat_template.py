"""Chat templates: loading, sandbox, and limits of time and output."""

import json
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from baton.core.errors import ModelError, Refused
from baton.gateway.text.chat_prompt import ChatPrompt
from baton.gateway.text.chat_template import ChatTemplate
from baton.gateway.text.chat_templates import ChatTemplates

USER = ChatPrompt(messages=({"role": "user", "content": "hi"},))


def stopped_clock() -> float:
    return 0.0


def ticking_clock(step_s: float = 0.001) -> Callable[[], float]:
    ticks = count()
    return lambda: next(ticks) * step_s


def render(source: str, prompt: ChatPrompt = USER, clock: Callable[[], float] = stopped_clock) -> str:
    return ChatTemplate(source, {"eos_token": "</s>"}).render(prompt, clock)


def test_templates_support_the_jinja_features_of_transformers() -> None:
    assert (
        render(
            "{% for m in messages %}{% if loop.index > 3 %}{% break %}{% endif %}"
            "{{ m.content }}{{ eos_token }}{% endfor %}"
        )
        == "hi</s>"
    )
    assert render("{{ messages | tojson }}") == json.dumps(list(USER.messages))
    assert render("{{ messages[0]['content'] + '<' + '>' }}") == "hi<>"
    assert render("{% if add_generation_prompt %}yes{% endif %}{{ tools is none }}") == "yesTrue"
    assert (
        render("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}")
        == "1"
    )
    assert render("{{ dict(a=1).a }}{{ dict.fromkeys(['b']) }}") == "1{'b': None}"


def test_template_can_reject_messages() -> None:
    with pytest.raises(Refused, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ undefined_thing.field }}",
        "{{ messages[5].content }}",
        "{{ 1 / 0 }}",
        "{{ 'x'|no_such_filter }}",
    ],
)
def test_forbidden_template_operation_rejects_the_request(source: str) -> None:
    with pytest.raises((Refused, ModelError)) as error:
        render(source)
    assert "chat template" in str(error.value)


@pytest.mark.fault("F-57")
@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{{ messages[0].content }}{% endfor %}",
        "{{ 'x' * 10000000000 }}",
        "{{ 2 ** 10000000000 }}",
        "{% set ns = namespace(s='x') %}{% for i in range(64) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    ],
)
def test_template_above_the_time_limit_is_stopped(source: str) -> None:
    with pytest.raises(Refused):
        render(source, clock=ticking_clock())


def test_rendering_within_a_time_ends_when_it_is_over() -> None:
    template = ChatTemplate("{% for i in range(100) %}{{ messages[0].content }}{% endfor %}", {})
    assert template.render_within(USER, ticking_clock(), 0.005) is None
    assert template.render_within(USER, stopped_clock, 0.005) == "hi" * 100
    assert template.render(USER, ticking_clock()) == "hi" * 100
    with pytest.raises(Refused, match="2 characters"):
        ChatTemplate("{{ messages[0].content * 2 }}", {}, max_characters=2).render_within(USER, stopped_clock, 1.0)


@pytest.mark.fault("F-57")
def test_template_output_is_bounded() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {}, max_characters=1000)
    with pytest.raises(Refused, match="1000 characters"):
        template.render(ChatPrompt(messages=({"role": "user", "content": "x" * 300},) * 4), stopped_clock)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x'.ljust(9999999999) }}",
        "{{ 'x'|center(9999999999) }}",
        "{{ '%9999999999d' % 1 }}",
        "{{ '%*d' % (9999999999, 1) }}",
        "{{ '{:9999999999}'.format(1) }}",
        "{{ '{:{w}}'.format(1, w=9999999999) }}",
        "{{ '%9999999999d'|format(1) }}",
        "{% set x = 'x' * 60000 %}{{ x.replace('x', x) }}",
        "{% set x = 'x' * 60000 %}{{ x|replace('x', x) }}",
        "{% set x = 'x' * 60000 %}{{ range(60000)|join(x) }}",
        "{% set x = 'x' * 60000 %}{{ x.join(x) }}",
        "{% set x = '\\n' * 60000 %}{{ x|indent(60000) }}",
        "{{ [1]|tojson(indent=9999999999) }}",
        "{{ '\\t'.expandtabs(9999999999) }}",
    ],
)
def test_operation_with_a_large_result_is_stopped_before_it_runs(source: str) -> None:
    with pytest.raises(Refused, match="chat template"):
        render(source)


def test_namespace_holds_no_private_names() -> None:
    for source in ("{% set ns = namespace(_x=1) %}", "{% set ns = namespace() %}{% set ns._x = 1 %}"):
        with pytest.raises(Refused, match="_x"):
            render(source)


def test_continued_message_needs_content_that_the_template_keeps() -> None:
    def continued(source: str, content: str | None) -> str:
        messages = ({"role": "assistant", "content": content},)
        prompt = ChatPrompt(messages=messages, continue_final_message=True, add_generation_prompt=False)
        return render(source, prompt)

    assert continued("<{{ messages[0].content }}>", "a b ") == "<a b "
    assert continued("<{{ messages[0].content | trim }}>", "a b ") == "<a b"
    with pytest.raises(Refused, match="has no content"):
        continued("{{ messages[0].content }}", None)
    with pytest.raises(Refused, match="changes the last message"):
        continued("nothing", "a b")


# Choice of the template.


def test_template_is_loaded_from_the_model_directory(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="no chat template"):
        _rendered(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "one {{ bos_token }}", "bos_token": {"content": "<s>"}}))
    assert _rendered(tmp_path) == "one <s>"
    config.write_text(
        json.dumps({"chat_template": [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "two"}]})
    )
    assert _rendered(tmp_path) == "two"
    assert _rendered(tmp_path, tools=[{}]) == "x"
    (tmp_path / "chat_template.jinja").write_text("three")
    assert _rendered(tmp_path, tools=[{}]) == "three"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("four")
    assert _rendered(tmp_path, template="rag") == "four"
    assert _rendered(tmp_path, template="{{ 1 + 4 }}") == "5"


def test_model_with_named_templates_only_needs_a_name(tmp_path: Path) -> None:
    named = [{"name": "rag", "template": "x"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    with pytest.raises(Refused, match="one of rag"):
        _rendered(tmp_path)


def test_own_template_with_an_error_is_refused(tmp_path: Path) -> None:
    for source in ("{% for %}", "{{ " + "(" * 5000 + ")" * 5000 + " }}"):
        with pytest.raises(Refused, match="chat_template is invalid"):
            _rendered(tmp_path, template=source)


@pytest.mark.parametrize("text", ["[", "[]", '{"chat_template": "{% for %}"}'])
def test_error_names_the_unusable_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(text)
    with pytest.raises(ModelError):
        ChatTemplates.load(tmp_path)


def _rendered(directory: Path, **fields: Any) -> str:
    prompt = ChatPrompt(messages=USER.messages, **fields)
    return ChatTemplates.load(directory).of(prompt).render(prompt, stopped_clock)
