"""Writes the grammar of a message with tool calls, in the format of the model.

A message that must have calls is: reasoning, if the format has it and the prompt has not ended it, then the
calls. A message that may have strict calls is: reasoning, then text in which each call follows its grammar.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.gateway.constraints.answer_constraint import ContentRule
from baton.gateway.constraints.argument_grammar import gemma_object, parameters
from baton.gateway.constraints.lark_writer import LarkWriter
from baton.gateway.output.formats import CallLayout, OutputFormat, ToolFormat
from baton.gateway.output.prompt_end import opens_reasoning

_SPACE = r"/[ \n]{0,4}/"
"""White space between reasoning and calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallableTool:
    """A tool that a message may call.

    parameters: JSON schema of the arguments; None if there are none.
    strict: a part of the schema that is not supported is an error.
    """

    name: str
    parameters: Mapping[str, Any] | None = None
    strict: bool = False

    @property
    def schema(self) -> Mapping[str, Any]:
        """Schema of the arguments, which are always an object."""
        if self.parameters is None:
            return {"type": "object", "properties": {}, "additionalProperties": False}
        return {"type": "object", **self.parameters}


class MessageGrammar:
    """Writes grammars for one output format and prompt."""

    def __init__(
        self, output_format: OutputFormat, tools: ToolFormat, token_ids: Mapping[str, int], prompt: str
    ) -> None:
        """Create the writer. `token_ids` are the ids of the tokenizer's added tokens by their text.

        `prompt` is the end of the prompt, which may begin or end the reasoning.
        """
        self._writer = LarkWriter(token_ids)
        self._tools = tools
        self._format = output_format
        self._token_ids = token_ids
        self._prompt = prompt

    def required(self, tools: Sequence[CallableTool], *, parallel: bool) -> str:
        """Return the grammar of a message with at least one call; of exactly one without `parallel`."""
        return self._writer.grammar(f"{self._reasoning_block()} {self._calls(tools, parallel=parallel)}".strip())

    def automatic(self, tools: Sequence[CallableTool], *, parallel: bool) -> str | None:
        """Return the grammar of a message that may have calls; None if the format has no certain beginning.

        Its calls must begin with an added token, which is then no text.
        """
        begin = self._tools.syntax.section_begin or self._tools.syntax.before_name
        if self._tools.bare or self._tools.layout is CallLayout.HARMONY or not self._writer.begins_with_token(begin):
            return None
        text = self._writer.free_text(*self._tools.triggers)
        calls = f"({self._calls(tools, parallel=parallel)} {text}){'*' if parallel else '?'}"
        return self._writer.grammar(f"{self._reasoning_block()} {text} {calls}".strip())

    def content(self, rule: ContentRule, tools: Sequence[CallableTool], *, parallel: bool) -> str | None:
        """Return the grammar of a message that is either content or calls.

        None if the format has no certain beginning of calls; then they could not be told from content.
        """
        begin = self._tools.syntax.section_begin or self._tools.syntax.before_name
        if self._tools.bare or not self._writer.begins_with_token(begin):
            return None
        content = constrained_content(self._writer, self._format, rule)
        if self._tools.layout is CallLayout.HARMONY:
            content = f"({content})"
        message = f"({content} | {self._calls(tools, parallel=parallel)})"
        return self._writer.grammar(f"{self._reasoning_block()} {message}".strip())

    def _reasoning_block(self) -> str:
        return reasoning_block(self._writer, self._format, self._token_ids, self._prompt)

    def _calls(self, tools: Sequence[CallableTool], *, parallel: bool) -> str:
        syntax, writer = self._tools.syntax, self._writer
        call = writer.rule(" | ".join(self._call(tool) for tool in tools))
        is_harmony = self._tools.layout is CallLayout.HARMONY  # its messages have one call
        more = f" ({writer.text(syntax.separator)} {call})*" if parallel and not is_harmony else ""
        return f"{writer.text(syntax.section_begin)} {call}{more} {writer.text(syntax.section_end)}".strip()

    def _call(self, tool: CallableTool) -> str:
        """Return an expression for one call. The end of a harmony message is an end token of the model."""
        syntax, writer = self._tools.syntax, self._writer
        head = writer.text(syntax.before_name + tool.name + syntax.after_name)
        tail = "" if self._tools.layout is CallLayout.HARMONY else writer.text(syntax.after_arguments)
        return f"{head} {self._arguments(tool)} {tail}".strip()

    def _arguments(self, tool: CallableTool) -> str:
        lenient, syntax = not tool.strict, self._tools.syntax
        if self._tools.layout is CallLayout.PARAMETERS and syntax.parameters is not None:
            return parameters(self._writer, syntax.parameters, tool.schema, lenient=lenient)
        if self._tools.layout is CallLayout.GEMMA:
            return gemma_object(self._writer, syntax.string_delimiter, tool.schema, lenient=lenient)
        return self._writer.json(tool.schema, lenient=lenient)


def content_grammar(
    output_format: OutputFormat, token_ids: Mapping[str, int], prompt: str | None, rule: ContentRule
) -> str:
    """Return the grammar of an answer that is constrained content, after reasoning if the format has it.

    prompt: the end of the prompt of a chat; None for a completion, which has no reasoning of its own.

    Raises GrammarTextError if the rule has an invalid text.
    """
    writer = LarkWriter(token_ids)
    if prompt is None:
        return writer.grammar(rule.expression(writer))
    content = constrained_content(writer, output_format, rule)
    return writer.grammar(f"{reasoning_block(writer, output_format, token_ids, prompt)} {content}".strip())


def constrained_content(writer: LarkWriter, output_format: OutputFormat, rule: ContentRule) -> str:
    """Return an expression for the content of a message, with its header in the harmony format."""
    content = rule.expression(writer)
    if not _is_harmony(output_format):
        return content
    header = (
        f"{writer.text('<|channel|>final')} (/ ?/ {writer.text('<|constrain|>json')})? {writer.text('<|message|>')}"
    )
    return f"{header} {content}"


def reasoning_block(writer: LarkWriter, output_format: OutputFormat, token_ids: Mapping[str, int], prompt: str) -> str:
    """Return an expression for the reasoning before content or calls; empty if there is none."""
    reasoning = output_format.reasoning
    if reasoning is None:
        return ""
    if _is_harmony(output_format):
        begin = writer.text("<|channel|>analysis<|message|>")
        return f"({begin} {writer.text_until('<|end|>')} {writer.text('<|start|>assistant')})?"
    if opens_reasoning(prompt, reasoning, token_ids):
        again = f"({writer.text(reasoning.open)})?" if reasoning.always_open else ""
        return f"{again} {writer.text_until(reasoning.close)} {_SPACE}".strip()
    if prompt.rstrip().endswith(reasoning.close.strip()):
        return ""
    return f"({writer.text(reasoning.open)} {writer.text_until(reasoning.close)})? {_SPACE}"


def _is_harmony(output_format: OutputFormat) -> bool:
    return output_format.tools is not None and output_format.tools.layout is CallLayout.HARMONY
