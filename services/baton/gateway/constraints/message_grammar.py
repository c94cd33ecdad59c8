"""Writes the grammar of a message with tool calls, in the format of the model.

A message that must have calls is: reasoning, if the format has it and the prompt has not ended it, then the
calls. A message that may have strict calls is: reasoning, then text in which each call follows its grammar.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.gateway.constraints.answer_constraint import ContentRule, JsonRule
from baton.gateway.constraints.gemma_grammar import GemmaGrammar
from baton.gateway.constraints.lark_writer import LarkWriter, WrittenGrammar, escaped
from baton.gateway.constraints.object_shape import ShapeReader
from baton.gateway.constraints.parameter_grammar import ParameterGrammar
from baton.gateway.constraints.unsupported_schema import UnsupportedSchema
from baton.gateway.output.formats import CallLayout, ContentForm, OutputFormat, ToolFormat
from baton.gateway.output.prompt_end import opens_reasoning
from baton.gateway.output.values.typed_values import ToolTypes

_SPACE = r"/[ \n]{0,4}/"
"""White space between reasoning and calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallableTool:
    """A tool that a message may call.

    parameters: JSON schema of the arguments, as `read_schema` returns it; None if there are none.
    strict: a part of the schema that is not supported is an error.
    sent: the schema as the client sent it, by which arguments are parsed; None if it is `parameters`.
    """

    name: str
    parameters: Mapping[str, Any] | None = None
    strict: bool = False
    sent: Mapping[str, Any] | None = None

    @property
    def schema(self) -> Mapping[str, Any]:
        """Schema of the arguments, which are always an object."""
        if self.parameters is None:
            return {"type": "object", "properties": {}, "additionalProperties": False}
        return {"type": "object", **self.parameters} | {"type": "object"}  # the schema may allow others, too


class MessageGrammar:
    """Writes grammars for one output format and prompt."""

    def __init__(
        self, output_format: OutputFormat, tools: ToolFormat, token_ids: Mapping[str, int], prompt: str
    ) -> None:
        """Create the writer. `token_ids` are the ids of the tokenizer's added tokens by their text.

        `prompt` is the end of the prompt, which may begin or end the reasoning.
        """
        self._writer = LarkWriter(token_ids)
        self._reader = ShapeReader()
        self._tools = tools
        self._format = output_format
        self._token_ids = token_ids
        self._prompt = prompt

    def required(self, tools: Sequence[CallableTool], *, parallel: bool) -> WrittenGrammar:
        """Return the grammar of a message with at least one call; of exactly one without `parallel`."""
        return self._writer.grammar(f"{self._reasoning_block()} {self._calls(tools, parallel=parallel)}".strip())

    def automatic(self, tools: Sequence[CallableTool], *, parallel: bool) -> WrittenGrammar:
        """Return the grammar of a message that may have calls.

        A trigger always begins a call. Text of a message cannot contain it.
        """
        if self._format.is_harmony:
            return self._writer.grammar(self._automatic_harmony(tools))
        if self._tools.bare:
            message = self._automatic_bare(tools, parallel=parallel)
        else:
            text, repeats = self._writer.free_text(*self._tools.triggers), "*" if parallel else "?"
            message = f"({self._text_and_calls(tools, parallel=parallel)}){repeats} {text}"
        return self._writer.grammar(f"{self._reasoning_block()} {message}".strip())

    def _text_and_calls(self, tools: Sequence[CallableTool], *, parallel: bool) -> str:
        """Return an expression for text that ends with a call, or with a section of calls."""
        writer, (trigger, *others) = self._writer, self._tools.triggers
        excluded = [f"(?s:.*){escaped(other)}(?s:.*)" for other in others]
        has_section = bool(self._tools.syntax.section_begin)
        calls = self._calls(tools, parallel=parallel and has_section, after=trigger)
        return f"{writer.text_until(trigger, excluded=excluded)} {calls}"

    def _automatic_bare(self, tools: Sequence[CallableTool], *, parallel: bool) -> str:
        """Return an expression for a message that is a call if it begins with a brace."""
        brace = r"\s*\{(?s:.*)"
        text = self._writer.free_text(*self._tools.triggers, patterns=(brace,))
        calls = self._calls(tools, parallel=parallel)
        tagged = self._writer.text_until(self._tools.triggers[0], excluded=(brace,))
        return f"({calls} | {text} | {tagged} {calls})"

    def _automatic_harmony(self, tools: Sequence[CallableTool]) -> str:
        """Return an expression for messages of which the last one is a call or the answer."""
        writer = self._writer
        channel = (
            f"({writer.text('<|channel|>analysis<|message|>')} | {writer.text('<|channel|>commentary<|message|>')})"
        )
        before = f"({channel} {writer.text_until('<|end|>')} {writer.text('<|start|>assistant')})*"
        text = writer.free_text("<|end|>", "<|channel|>", "<|start|>")
        final = f"{writer.text('<|channel|>final<|message|>')} {text}"
        return f"{before} ({final} | {self._calls(tools, parallel=False)})"

    def content(self, rule: ContentRule, tools: Sequence[CallableTool], *, parallel: bool) -> WrittenGrammar | None:
        """Return the grammar of a message that is either content or calls.

        None if the two could not be told apart: if the beginning of a call is text that the content may have.
        A JSON object is the one call that a format with bare calls may have here.
        """
        content = constrained_content(self._writer, self._format, rule)
        begin = self._tools.syntax.section_begin or self._tools.syntax.before_name
        is_spaced = rule.form is ContentForm.SPACED
        if self._writer.begins_with_token(begin) and not self._tools.bare:
            space = "" if is_spaced else f"{_SPACE} "
            calls = space + self._calls(tools, parallel=parallel)
        elif not isinstance(rule, JsonRule) or self._tools.layout is not CallLayout.JSON_OBJECT:
            return None
        elif self._tools.bare:
            calls = " | ".join(self._json_call(tool) for tool in tools)
        else:
            calls = self._calls(tools, parallel=parallel)
        reasoning = self._reasoning_block(is_spaced=is_spaced)
        return self._writer.grammar(f"{reasoning} (({content}) | {calls})".strip())

    def _json_call(self, tool: CallableTool) -> str:
        """Return an expression for a bare call as JSON, which shares its beginning with other JSON."""
        properties = {"name": {"const": tool.name}, "parameters": tool.schema}
        schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
        self._writer.forget_definitions()
        lenient = not tool.strict
        return self._writer.json(schema, lenient=lenient, coerce=lenient, definitions=tool.schema, place=_place(tool))

    def _reasoning_block(self, *, is_spaced: bool = True) -> str:
        return reasoning_block(self._writer, self._format, self._token_ids, self._prompt, is_spaced=is_spaced)

    def _calls(self, tools: Sequence[CallableTool], *, parallel: bool, after: str = "") -> str:
        """Return an expression for calls. `after` is the beginning of the first one, which precedes it."""
        syntax, writer = self._tools.syntax, self._writer
        section = syntax.section_begin[len(after) :]
        cut = "" if syntax.section_begin else after
        call = writer.rule(" | ".join(self._call(tool, cut) for tool in tools))
        is_repeated = parallel and not self._format.is_harmony  # its messages have one call
        more = f" ({writer.text(syntax.separator)} {call})*" if is_repeated else ""
        return f"{writer.text(section)} {call}{more} {writer.text(syntax.section_end)}".strip()

    def _call(self, tool: CallableTool, after: str = "") -> str:
        """Return an expression for one call. The end of a harmony message is an end token of the model."""
        syntax, writer = self._tools.syntax, self._writer
        before = syntax.before_name[len(after) :]
        if prefix := self._tools.id_prefix:
            number = f"/[0-9]{{1,3}}/ {writer.text(syntax.after_name)}"
            head = f"{writer.text(f'{before}{prefix}{tool.name}:')} {number}"
        else:
            head = writer.text(before + tool.name + syntax.after_name)
        tail = "" if self._format.is_harmony else writer.text(syntax.after_arguments)
        return f"{head} {self._arguments(tool)} {tail}".strip()

    def _arguments(self, tool: CallableTool) -> str:
        lenient, syntax, writer, reader = not tool.strict, self._tools.syntax, self._writer, self._reader
        writer.forget_definitions()
        schema, place = tool.schema, _place(tool)
        try:
            if self._tools.layout is CallLayout.PARAMETERS and syntax.parameters is not None:
                parsed_by = ToolTypes({tool.name: schema if tool.sent is None else tool.sent})
                return ParameterGrammar(
                    writer,
                    reader,
                    syntax.parameters,
                    schema,
                    types=parsed_by,
                    tool=tool.name,
                    lenient=lenient,
                ).expression()
            if self._tools.layout is CallLayout.GEMMA:
                delimiter = syntax.string_delimiter
                return GemmaGrammar(writer, reader, delimiter, schema, tool=tool.name, lenient=lenient).expression()
        except UnsupportedSchema as error:
            pointer = error.pointer(schema)
            raise UnsupportedSchema(f"{place}{f' at {pointer}' if pointer else ''}: {error}") from error
        return writer.json(schema, lenient=lenient, coerce=lenient, place=place)


def _place(tool: CallableTool) -> str:
    return f"the parameters of the tool {tool.name!r}"


def content_grammar(
    output_format: OutputFormat, token_ids: Mapping[str, int], prompt: str | None, rule: ContentRule
) -> WrittenGrammar:
    """Return the grammar of an answer that is constrained content, after reasoning if the format has it.

    prompt: the end of the prompt of a chat; None for a completion, which has no reasoning of its own.

    Raises GrammarTextError if the rule has an invalid text.
    """
    writer = LarkWriter(token_ids)
    if prompt is None:
        return writer.grammar(rule.expression(writer))
    content = constrained_content(writer, output_format, rule)
    is_spaced = rule.form is ContentForm.SPACED
    reasoning = reasoning_block(writer, output_format, token_ids, prompt, is_spaced=is_spaced)
    return writer.grammar(f"{reasoning} {content}".strip())


def constrained_content(writer: LarkWriter, output_format: OutputFormat, rule: ContentRule) -> str:
    """Return an expression for the content of a message, with its header in the harmony format."""
    content = rule.expression(writer)
    if not output_format.is_harmony:
        return content
    header = (
        f"{writer.text('<|channel|>final')} (/ ?/ {writer.text('<|constrain|>json')})? {writer.text('<|message|>')}"
    )
    return f"{header} {content}"


def reasoning_block(
    writer: LarkWriter, output_format: OutputFormat, token_ids: Mapping[str, int], prompt: str, *, is_spaced: bool
) -> str:
    """Return an expression for the reasoning before content or calls; empty if there is none.

    is_spaced: white space may follow the reasoning, because it can be told from the content. Without
        reasoning it would be content, so there is none.
    """
    space = _SPACE if is_spaced else ""
    reasoning = output_format.reasoning
    if reasoning is None:
        return ""
    if output_format.is_harmony:
        begin = writer.text("<|channel|>analysis<|message|>")
        return f"({begin} {writer.text_until('<|end|>')} {writer.text('<|start|>assistant')})?"
    if opens_reasoning(prompt, reasoning, token_ids):
        again = f"({writer.text(reasoning.open)})?" if reasoning.always_open else ""
        return f"{again} {writer.text_until(reasoning.close)} {space}".strip()
    if prompt.rstrip().endswith(reasoning.close.strip()):
        return ""
    return f"({writer.text(reasoning.open)} {writer.text_until(reasoning.close)} {space})?"
