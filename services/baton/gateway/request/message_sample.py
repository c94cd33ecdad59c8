"""Builds the message of one sample: parses its tokens into content, reasoning and tool calls."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from baton.core.client_api import MessagePart, PartKind
from baton.core.request import FinishReason
from baton.gateway.input.client_call import MessageOptions
from baton.gateway.output.formats import SpecialToken
from baton.gateway.output.parsing import message_parser
from baton.gateway.text.detokenizer import Detokenizer
from baton.gateway.text.stop_strings import StopMatcher, StopPatterns


class MessageSample:
    """One sample of a chat. Implements `SampleOutput`.

    Stop strings apply to the content. The text of reasoning and calls is not searched for them.
    """

    __slots__ = (
        "_detokenizer",
        "_min_tokens",
        "_options",
        "_parser",
        "_parts",
        "_special_tokens",
        "_stops",
        "num_reasoning_tokens",
        "num_tokens",
    )

    def __init__(
        self,
        detokenizer: Detokenizer,
        special_tokens: Mapping[int, SpecialToken],
        options: MessageOptions,
        call_id_seed: str,
        stops: StopPatterns,
        min_tokens: int,
    ) -> None:
        """Create the sample. `special_tokens`, by id, divide the text and have no text of their own."""
        self._detokenizer = detokenizer
        self._special_tokens = special_tokens
        self._options = options
        self._parser = message_parser(options.output_format, replace(options.parser, call_id_seed=call_id_seed))
        self._stops = StopMatcher(stops) if stops else None
        self._min_tokens = min_tokens
        self._parts: list[MessagePart] = []
        self.num_tokens = 0
        self.num_reasoning_tokens = 0

    @property
    def num_calls(self) -> int:
        return self._parser.num_calls

    @property
    def stop_string(self) -> str:
        return self._stops.found if self._stops else ""

    def put(self, token_id: int) -> bool:
        self.num_tokens += 1
        was_reasoning = self._parser.in_reasoning
        special = self._special_tokens.get(token_id)
        if special is None:
            text = self._detokenizer.put(token_id)
            found = bool(text) and self._add(self._parser.put(text))
        else:
            text = self._detokenizer.flush()
            found = bool(text) and self._add(self._parser.put(text))
            found = found or self._add(self._parser.put(special))
        self.num_reasoning_tokens += was_reasoning and self._parser.in_reasoning
        return found

    def finish(self, reason: FinishReason) -> bool:
        text = self._detokenizer.flush()
        if (text and self._add(self._parser.put(text))) or self._add(self._parser.finish(reason)):
            return True
        self._release_held()
        return False

    def take(self) -> tuple[str, tuple[MessagePart, ...]]:
        parts, self._parts = tuple(self._parts), []
        return "", parts

    def _add(self, parts: Iterable[MessagePart]) -> bool:
        """Add parts for the client. Return True if a stop string was found in the content."""
        for part in parts:
            if part.kind is PartKind.CONTENT and self._stops is not None:
                if self.num_tokens < self._min_tokens:
                    text, found = self._stops.pass_through(part.text), False
                else:
                    text, found = self._stops.put(part.text)
                self._append(replace(part, text=text))
                if found:
                    return True
            else:
                self._release_held()
                self._append(part)
        return False

    def _release_held(self) -> None:
        """Add content that was held back as the possible beginning of a stop string."""
        if self._stops is not None and (held := self._stops.flush()):
            self._append(MessagePart(kind=PartKind.CONTENT, text=held))

    def _append(self, part: MessagePart) -> None:
        """Append a part that the client wants, to the last part if both are text of the same kind."""
        if part.kind is PartKind.REASONING and not self._options.include_reasoning:
            return
        if part.call_index and not self._options.parallel_calls:
            return
        if not part.text and part.kind is not PartKind.TOOL_CALL:
            return
        last = self._parts[-1] if self._parts else None
        if last is not None and last.kind is part.kind is not PartKind.TOOL_CALL and last.call_index == part.call_index:
            self._parts[-1] = replace(last, text=last.text + part.text)
        else:
            self._parts.append(part)
