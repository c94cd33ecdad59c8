"""Validates the tools of a chat request, and how the model may use them."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from baton.core.errors import Reason
from baton.core.request_limits import printable
from baton.gateway.input import field_policy
from baton.gateway.input.chat.plain_values import ValueBudget
from baton.gateway.input.client_call import InvalidField
from baton.gateway.input.field_reader import FieldReader, as_object, check_count, check_fields
from baton.gateway.input.ignored_fields import UnknownFields
from baton.gateway.input.json_pieces import JSON_LISTS

MAX_TOOLS_CHARACTERS = 256 * 1024
"""Characters of all tools of a request. A value that is not text counts as eight."""
MAX_NAME_CHARACTERS = 64
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_LEGACY_CHOICES = "must be 'none', 'auto' or {\"name\": ...}"
_KINDS = "must be 'function' or 'allowed_tools'"
_CHOICES = "must be 'none', 'auto', 'required', or an object whose type is 'function' or 'allowed_tools'"


class ToolMode(Enum):
    """Rule for the calls in an answer."""

    NONE = "none"
    """The answer is text. It is not searched for calls."""
    AUTO = "auto"
    """The model chooses between text and calls."""
    REQUIRED = "required"
    """The answer has at least one call, of any tool or of the named one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may call.

    parameters: JSON schema of the arguments; None if it takes none.
    strict: the arguments must match the schema even if the model chooses to call it.
    place: the field that has it, for errors.
    """

    name: str
    parameters: Mapping[str, Any] | None = None
    strict: bool = False
    place: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The tools of a request that the model may see, and how it may use them.

    only: name of the one tool that must be called.
    parallel: one answer may have several calls.
    is_legacy: the client used `functions`, and gets its call as `function_call`.
    num_characters: size of the tools.
    """

    tools: tuple[Tool, ...] = ()
    mode: ToolMode = ToolMode.NONE
    only: str | None = None
    parallel: bool = True
    is_legacy: bool = False
    num_characters: int = field(default=0, compare=False)


NO_TOOLS = ToolUse()


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFields:
    """Tools of a request for the output, and for the template.

    schemas: the tools in OpenAI's form; None if there are none.
    """

    use: ToolUse = NO_TOOLS
    schemas: tuple[Mapping[str, Any], ...] | None = None


def parse_tools(body: Mapping[str, Any], unknown: UnknownFields) -> ToolFields:
    """Return the tools of a chat request, and report unknown fields. Raises InvalidField."""
    is_legacy = body.get("functions") is not None or body.get("function_call") is not None
    if is_legacy and (body.get("tools") is not None or body.get("tool_choice") is not None):
        raise InvalidField("functions", "both tools and the older functions are set; send only tools and tool_choice")
    name = "functions" if is_legacy else "tools"
    values = body.get(name)
    parallel = body.get("parallel_tool_calls") is None or FieldReader(body).flag("parallel_tool_calls")
    if values is not None and not isinstance(values, JSON_LISTS):
        raise InvalidField(name, f"{name} is {printable(values)}; must be a list")
    check_count("tools", len(values or ()), name)
    budget = ValueBudget(name, MAX_TOOLS_CHARACTERS)
    parse = _function if is_legacy else _tool
    parsed = [parse(f"{name}[{index}]", value, budget, unknown) for index, value in enumerate(values or ())]
    tools = tuple(tool for tool, _ in parsed)
    known: set[str] = set()
    for index, tool in enumerate(tools):
        if tool.name in known:
            raise InvalidField(f"{name}[{index}]", f"{name} has {tool.name!r} twice; names must be unique")
        known.add(tool.name)
    choice = _choice(body, "function_call" if is_legacy else "tool_choice", known, unknown)
    allowed = known if choice.allowed is None else choice.allowed
    use = ToolUse(
        tools=tuple(tool for tool in tools if tool.name in allowed),
        mode=choice.mode,
        only=choice.only,
        parallel=parallel and not is_legacy,
        is_legacy=is_legacy,
        num_characters=budget.num_characters,
    )
    return ToolFields(use=use, schemas=tuple(schema for tool, schema in parsed if tool.name in allowed) or None)


def _tool(place: str, value: object, budget: ValueBudget, unknown: UnknownFields) -> tuple[Tool, dict[str, Any]]:
    tool = as_object(place, value)
    kind = tool.get("type")
    if kind != "function":
        message = f"{place}.type is {printable(kind)}; must be 'function', because only function tools are implemented"
        raise InvalidField(f"{place}.type", message, Reason.UNSUPPORTED_FIELD)
    check_fields(tool, field_policy.TOOLS, unknown, f"{place}.")
    return _function(f"{place}.function", tool.get("function"), budget, unknown)


def _function(place: str, value: object, budget: ValueBudget, unknown: UnknownFields) -> tuple[Tool, dict[str, Any]]:
    """Return a tool, and its form for templates, which are not told whether it is strict."""
    function = as_object(place, value)
    check_fields(function, field_policy.FUNCTIONS, unknown, f"{place}.")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidField(
            f"{place}.name",
            f"{place}.name is {printable(name)}; must have 1 to {MAX_NAME_CHARACTERS} letters, digits, '_', '-' or '.'",
        )
    strict = FieldReader(function).flag("strict") if isinstance(function.get("strict"), bool | None) else None
    if strict is None:
        raise InvalidField(
            f"{place}.strict", f"{place}.strict is {printable(function['strict'])}; must be true or false"
        )
    budget.take(len(name))
    schema: dict[str, Any] = {}
    for key, item in function.items():
        if key == "parameters" and item is not None:
            schema[key] = parameters = budget.plain_object(f"{place}.parameters", item)
            _check_is_object(f"{place}.parameters", parameters)
        elif key == "description" and item is not None:
            if not isinstance(item, str):
                raise InvalidField(
                    f"{place}.description", f"{place}.description is {printable(item)}; must be a string"
                )
            schema[key] = budget.plain(f"{place}.description", item)
        elif key == "name":
            schema[key] = name
    tool = Tool(name=name, parameters=parameters, strict=strict, place=place)
    return tool, {"type": "function", "function": schema}


def _check_is_object(place: str, schema: Mapping[str, Any]) -> None:
    """Raise InvalidField if the arguments of a tool cannot be an object. A call cannot have others."""
    kind = schema.get("type", "object")
    if kind != "object" and not (isinstance(kind, JSON_LISTS) and "object" in kind):
        message = f"{place}.type is {printable(kind)}; must be 'object', because the arguments of a call are an object"
        raise InvalidField(f"{place}.type", message)


@dataclass(frozen=True, slots=True)
class _Choice:
    """The meaning of `tool_choice`. only: name of the one tool. allowed: names of the tools; None for all."""

    mode: ToolMode
    only: str | None = None
    allowed: Collection[str] | None = None


def _choice(body: Mapping[str, Any], field: str, known: set[str], unknown: UnknownFields) -> _Choice:
    """Return how the tools may be used. Raises InvalidField."""
    value = body.get(field)
    if value is None:
        return _Choice(ToolMode.AUTO if known else ToolMode.NONE)
    if isinstance(value, str):
        if value not in ("none", "auto", "required") or (value == "required" and field == "function_call"):
            rule = _CHOICES if field == "tool_choice" else _LEGACY_CHOICES
            raise InvalidField(field, f"{field} is {printable(value)}; {rule}")
        mode = ToolMode(value)
        if mode is ToolMode.REQUIRED and not known:
            raise InvalidField(field, f"{field} is 'required', but there are no tools; send tools")
        return _Choice(mode if known else ToolMode.NONE)
    choice = as_object(field, value)
    if field == "tool_choice":
        if choice.get("type") not in ("function", "allowed_tools"):
            message = f"{field}.type is {printable(choice.get('type'))}; {_KINDS}"
            raise InvalidField(f"{field}.type", message, Reason.UNSUPPORTED_FIELD)
        check_fields(choice, field_policy.TOOL_CHOICE, unknown, f"{field}.")
        if choice["type"] == "allowed_tools":
            return _allowed(f"{field}.allowed_tools", choice.get("allowed_tools"), known, unknown)
        choice = as_object(f"{field}.function", choice.get("function"))
        field = f"{field}.function"
    check_fields(choice, field_policy.FUNCTION_NAME, unknown, f"{field}.")
    name = choice.get("name")
    if not isinstance(name, str) or name not in known:
        raise InvalidField(f"{field}.name", f"{field}.name is {printable(name)}; {_must_be_one_of(known)}")
    return _Choice(ToolMode.REQUIRED, only=name)


def _allowed(place: str, value: object, known: set[str], unknown: UnknownFields) -> _Choice:
    """Return the choice that keeps only some tools. Errors name a tool's place in the list."""
    choice = as_object(place, value)
    check_fields(choice, field_policy.ALLOWED_TOOLS, unknown, f"{place}.")
    mode, tools = choice.get("mode"), choice.get("tools")
    if mode not in ("auto", "required"):
        raise InvalidField(f"{place}.mode", f"{place}.mode is {printable(mode)}; must be 'auto' or 'required'")
    place = f"{place}.tools"
    if not isinstance(tools, JSON_LISTS) or not tools:
        what = "an empty list" if isinstance(tools, JSON_LISTS) else printable(tools)
        raise InvalidField(place, f"{place} is {what}; must be a list of one or more of the tools")
    check_count("tools", len(tools), place)
    names: dict[str, None] = {}
    for index, item in enumerate(tools):
        at = f"{place}[{index}]"
        tool = as_object(at, item)
        if tool.get("type") != "function":
            message = f"{at}.type is {printable(tool.get('type'))}; must be 'function'"
            raise InvalidField(f"{at}.type", message, Reason.UNSUPPORTED_FIELD)
        check_fields(tool, field_policy.ALLOWED_TOOL, unknown, f"{at}.")
        function = as_object(f"{at}.function", tool.get("function"))
        check_fields(function, field_policy.FUNCTION_NAME, unknown, f"{at}.function.")
        name = function.get("name")
        if not isinstance(name, str) or name not in known:
            raise InvalidField(at, f"{at} has the name {printable(name)}; {_must_be_one_of(known)}")
        if name in names:
            raise InvalidField(at, f"{at} has the name {printable(name)} a second time; send each tool once")
        names[name] = None
    return _Choice(ToolMode(mode), allowed=names)


def _must_be_one_of(known: set[str]) -> str:
    return f"must be one of the tools: {', '.join(sorted(known)[:8]) or 'none'}"
