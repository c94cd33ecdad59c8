"""Describes the formats in which models write reasoning and tool calls.

A format is data: the parser reads text by it, and a grammar builder can write text by it. Delimiters are
plain strings here. The tokenizer decides which of them are special tokens: see `special_text.split_special`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, Protocol

from baton.core.client_api import MessagePart
from baton.core.request import FinishReason


@dataclass(frozen=True, slots=True)
class SpecialToken:
    """A generated special token. The same characters from ordinary tokens are plain text, not this.

    hidden: the text is left out of the message where the token is no delimiter (`skip_special_tokens`).
    """

    text: str
    hidden: bool = True


class ContentForm(Enum):
    """Form of the content of a message, which decides what of its text is passed on."""

    FREE = "free"
    """Text with reasoning and calls. White space beside these is dropped."""
    TAGGED = "tagged"
    """Text with reasoning and calls, as the model wrote it."""
    SPACED = "spaced"
    """Text as the model wrote it, which does not begin with white space. White space before it is dropped."""
    EXACT = "exact"
    """Text as the model wrote it."""
    NONE = "none"
    """No text, because a call is required. Other text than reasoning and calls belongs to a call that was
    cut."""

    @property
    def is_whole(self) -> bool:
        """True if a message is either content or calls, so that content is not searched for delimiters."""
        return self in (ContentForm.SPACED, ContentForm.EXACT)


Piece = str | SpecialToken
"""A piece of a model's output: plain text, or one special token."""

ToolSchemas = Mapping[str, Mapping[str, Any]]
"""The JSON schema of the parameters of each tool of a request, by the tool's name."""


class CallLayout(Enum):
    """Layout of a tool call, by which a reader is chosen."""

    JSON_OBJECT = "json_object"
    """One JSON object with the keys `name` and `arguments`, or a list of them."""
    NAME_AND_JSON = "name_and_json"
    """The name, a delimiter and the arguments as a JSON object."""
    PARAMETERS = "parameters"
    """The name and each parameter between delimiters. Strings are written without quotes or escapes."""
    GEMMA = "gemma"
    """The name and an object like JSON, with bare keys and with delimiters of their own around strings."""
    HARMONY = "harmony"
    """A message of the harmony format, whose header names the recipient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSyntax:
    """Text of the arguments in the layout PARAMETERS.

    A parameter is `before_key` KEY `after_key` VALUE `after_value`. Nothing else stands between two of them.
    Strings are written as they are. Other values are written as JSON.

    after_string_key: stands in place of `after_key` before a string. If it is empty, the schema tells whether
        a value is a string.
    untyped_json: values without a schema are read as JSON if they are JSON, else as strings.
    """

    before_key: str
    after_key: str
    after_value: str
    after_string_key: str = ""
    untyped_json: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSyntax:
    """Text of a message's tool calls as the model writes it.

    `section_begin` CALL (`separator` CALL)* `section_end`, where a call is
    `before_name` NAME `after_name` ARGUMENTS `after_arguments`.

    ARGUMENTS is a JSON object for the layouts JSON_OBJECT, NAME_AND_JSON and HARMONY. For PARAMETERS it is
    the repetition of `parameters`. For GEMMA it is `{key:value,…}` with strings between `string_delimiter`s.
    """

    before_name: str
    after_name: str
    after_arguments: str
    section_begin: str = ""
    section_end: str = ""
    separator: str = ""
    parameters: ParameterSyntax | None = None
    string_delimiter: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """Format of tool calls.

    triggers: texts of which each begins the calls of a message, or one call. Free text cannot contain them.
    close: text that ends a call; empty if there is none. A malformed call is content up to it.
    bare: a call may begin a message without a trigger.
    id_delimiter: stands between the name and an id that the model gives; empty if it gives none.
    short_ids: call ids have 9 letters and digits, as Mistral's templates demand.
    id_prefix: the model writes an id in place of the name: this prefix, the name, `:` and a number.
    ends_reasoning: a call in the reasoning ends it. Models of the format leave out the delimiter there.
    """

    name: str
    layout: CallLayout
    triggers: tuple[str, ...]
    close: str
    syntax: CallSyntax
    bare: bool = False
    id_delimiter: str = ""
    short_ids: bool = False
    id_prefix: str = ""
    ends_reasoning: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """Format of reasoning: text between `open` and `close`, before the content.

    always_open: the model begins inside of the reasoning, whether or not the prompt shows it.
    is_harmony: the reasoning is a message of the harmony format.
    """

    name: str
    open: str
    close: str
    always_open: bool = False
    is_harmony: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ParserOptions:
    """Facts of a request and a sample that a parser needs.

    prompt: rendered prompt, of which the end counts: it may open the reasoning.
    tools: parameter schemas of the request's tools; their types direct the conversion to JSON.
    special_tokens: the tokenizer's added tokens. A delimiter that is one of them counts only as a
        `SpecialToken`.
    call_id_seed: seed of the ids of calls, unique for each request and sample.
    parse_tools: False reads no tool calls, so that their text stays content.
    single_call: the message ends with its first call. What follows is dropped.
    content: form of the content.
    """

    prompt: str = ""
    tools: ToolSchemas = field(default_factory=dict)
    special_tokens: frozenset[str] = frozenset()
    call_id_seed: str = ""
    parse_tools: bool = True
    single_call: bool = False
    content: ContentForm = ContentForm.FREE


class ReadProgress(NamedTuple):
    """Position of a parser in its text. All numbers count characters from the beginning.

    num_put: characters that were put. num_read: those of which the meaning is certain.
    reasoning_begin, reasoning_end: place of the last reasoning that was read.
    """

    num_put: int
    num_read: int
    reasoning_begin: int
    reasoning_end: int


class MessageParser(Protocol):
    """Streaming parser of one sample's text.

    Joined parts do not depend on how the text was divided into pieces. Text that may begin a delimiter is
    held back until this is decided.
    """

    @property
    def num_calls(self) -> int:
        """Number of tool calls that began so far."""
        ...

    @property
    def is_complete(self) -> bool:
        """True if the message has its only call, so that further text is dropped."""
        ...

    @property
    def progress(self) -> "ReadProgress":
        """Return which text was read so far; used to count reasoning tokens."""
        ...

    def put(self, piece: Piece) -> tuple[MessagePart, ...]:
        """Add a piece of text and return the parts that are certain now."""
        ...

    def finish(self, reason: FinishReason) -> tuple[MessagePart, ...]:
        """End the text and return what was held back. Call it once; `put` is not allowed afterwards."""
        ...

    def close(self) -> None:
        """Free what the parser holds, whether or not `finish` was called. Nothing is allowed afterwards."""
        ...


class MessageTemplate(Protocol):
    """Declarative format of whole messages, such as a `response_template`."""

    def parser(self, options: ParserOptions) -> MessageParser:
        """Return a new parser for one sample."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFormat:
    """Format of a model's messages. Without tools, reasoning and template, all text is content.

    template: an interpreted `response_template`, which then replaces `tools` and `reasoning`; those two may
        still describe the same format for a grammar builder.
    """

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None
    template: MessageTemplate | None = None

    @property
    def is_harmony(self) -> bool:
        """True for messages of the harmony format, whether or not their calls are read."""
        has_harmony_calls = self.tools is not None and self.tools.layout is CallLayout.HARMONY
        return has_harmony_calls or (self.reasoning is not None and self.reasoning.is_harmony)

    def __bool__(self) -> bool:
        """True if messages have anything but content."""
        return bool(self.tools or self.reasoning or self.template)
