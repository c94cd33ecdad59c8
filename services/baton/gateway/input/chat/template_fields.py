"""Validates the fields of a chat request that only the chat template reads."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from baton.core.request_limits import printable
from baton.gateway.input.chat.plain_values import ValueBudget
from baton.gateway.input.client_call import InvalidField
from baton.gateway.input.field_reader import FieldReader, as_object, check, check_count
from baton.gateway.input.json_pieces import JSON_LISTS

MAX_VARIABLES_CHARACTERS = 64 * 1024
MAX_DOCUMENTS_CHARACTERS = 4 * 2**20
"""Characters of `chat_template_kwargs` and of `documents`. A value that is not text counts as eight."""
RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template")
"""Variables of a template that have fields of their own."""
THINKING_VARIABLES = ("enable_thinking", "thinking")
"""Variables of chat templates that say whether the model reasons. Families differ in the name."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateFields:
    """Fields for the chat template; see `ChatPrompt`."""

    variables: Mapping[str, Any]
    documents: tuple[Mapping[str, Any], ...] | None
    add_generation_prompt: bool
    continue_final_message: bool
    template: str | None
    num_characters: int


def parse_template_fields(body: Mapping[str, Any]) -> TemplateFields:
    """Return the fields for the template. Raises InvalidField.

    `reasoning_effort` becomes a variable of this name. The effort `none` also sets
    `THINKING_VARIABLES` to false, which more templates know.
    """
    read = FieldReader(body)
    continues = read.flag("continue_final_message")
    begins = not continues if body.get("add_generation_prompt") is None else read.flag("add_generation_prompt")
    if continues and begins:
        raise InvalidField(
            "continue_final_message",
            "continue_final_message and add_generation_prompt are both true; set one of them to false",
        )
    template = body.get("chat_template")
    if template is not None:
        check("chat_template", template)
    variables, num_characters = _variables(body.get("chat_template_kwargs"))
    effort = body.get("reasoning_effort")
    if effort is not None:
        check("reasoning_effort", effort)
        off = dict.fromkeys(THINKING_VARIABLES, False) if effort == "none" else {}
        variables = {"reasoning_effort": effort, **off, **variables}
    documents, document_characters = _documents(body.get("documents"))
    return TemplateFields(
        variables=variables,
        documents=documents,
        add_generation_prompt=begins,
        continue_final_message=continues,
        template=template,
        num_characters=num_characters + document_characters,
    )


def _variables(value: object) -> tuple[dict[str, Any], int]:
    if value is None:
        return {}, 0
    given = as_object("chat_template_kwargs", value)
    check_count("chat_template_kwargs", len(given))
    for name in given:
        if not _NAME.fullmatch(name):
            raise InvalidField(
                "chat_template_kwargs",
                f"chat_template_kwargs has the name {printable(name)}; names have 1 to 64 letters, digits and '_'",
            )
        if name in RESERVED:
            raise InvalidField(
                "chat_template_kwargs", f"chat_template_kwargs cannot set {name}; use the field of that name"
            )
    budget = ValueBudget("chat_template_kwargs", MAX_VARIABLES_CHARACTERS)
    return budget.plain_object("chat_template_kwargs", given), budget.num_characters


def _documents(value: object) -> tuple[tuple[Mapping[str, Any], ...] | None, int]:
    if value is None:
        return None, 0
    if not isinstance(value, JSON_LISTS):
        raise InvalidField("documents", f"documents is {printable(value)}; must be a list of objects")
    check_count("documents", len(value))
    budget = ValueBudget("documents", MAX_DOCUMENTS_CHARACTERS)
    documents = tuple(budget.plain_object(f"documents[{n}]", document) for n, document in enumerate(value))
    return documents or None, budget.num_characters
