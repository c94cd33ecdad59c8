"""Builds the message of one sample: parses its tokens into content, reasoning and tool calls."""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace

from baton.core.client_api import MessagePart, PartKind
from baton.core.request import FinishReason
from baton.gateway.input.client_call import MessageOptions
from baton.gateway.output.formats import ReadProgress, SpecialToken
from baton.gateway.output.parsing import message_parser
from baton.gateway.text.detokenizer import Detokenizer
from baton.gateway.text.stop_strings import StopMatcher, StopPatterns


class MessageSample:
    """One sample of a chat. Implements `SampleOutput`.

    Stop strings apply to the content. The text of reasoning and calls is not searched for them. If the client
    wants one call at most, the first one ends the sample as a stop string does.
    """

    __slots__ = (
        "_detokenizer",
        "_min_tokens",
        "_num_put",
        "_options",
        "_parser",
        "_parts",
        "_reasoning_tokens",
        "_special_tokens",
        "_stops",
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
        self._reasoning_tokens = _ReasoningTokens()
        self._num_put = self._parser.progress.num_put  # characters of earlier tokens

    @property
    def num_calls(self) -> int:
        return self._parser.num_calls

    @property
    def num_reasoning_tokens(self) -> int:
        return self._reasoning_tokens.num_tokens

    @property
    def stop_string(self) -> str:
        return self._stops.found if self._stops else ""

    def put(self, token_id: int) -> bool:
        self.num_tokens += 1
        special = self._special_tokens.get(token_id)
        if special is not None:
            return self._put_special(special)
        begin = self._num_put
        text = self._detokenizer.put(token_id)
        found = bool(text) and self._add(self._parser.put(text))
        self._count(begin)
        return found or self._is_complete

    def put_stop_token(self, token_id: int) -> bool:
        self.num_tokens += 1
        special = self._special_tokens.get(token_id)
        if special is not None:  # it may end a part of the message
            return self._put_special(replace(special, hidden=True))
        self._count(self._num_put)
        return False

    def finish(self, reason: FinishReason) -> bool:
        text = self._detokenizer.flush()
        found = (bool(text) and self._add(self._parser.put(text))) or self._add(self._parser.finish(reason))
        self._reasoning_tokens.update(self._parser.progress)
        if not found:
            self._release_held()
        return found

    def close(self) -> None:
        self._parser.close()

    def take(self) -> tuple[str, tuple[MessagePart, ...]]:
        parts, self._parts = tuple(self._parts), []
        return "", parts

    @property
    def _is_complete(self) -> bool:
        """True if the message has the only call that the client wants, and `min_tokens` tokens."""
        return self._parser.is_complete and self.num_tokens >= self._min_tokens

    def _put_special(self, special: SpecialToken) -> bool:
        text = self._detokenizer.flush()
        found = bool(text) and self._add(self._parser.put(text))
        begin = self._parser.progress.num_put if text else self._num_put
        found = found or self._add(self._parser.put(special))
        self._count(begin)
        return found or self._is_complete

    def _count(self, begin: int) -> None:
        """Count a token whose text begins at `begin`, and which the parser has."""
        progress = self._parser.progress
        self._num_put = progress.num_put
        self._reasoning_tokens.add(begin, progress)

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
        if not part.text and part.kind is not PartKind.TOOL_CALL:
            return
        last = self._parts[-1] if self._parts else None
        if last is not None and last.kind is part.kind is not PartKind.TOOL_CALL and last.call_index == part.call_index:
            self._parts[-1] = replace(last, text=last.text + part.text)
        else:
            self._parts.append(part)


class _ReasoningTokens:
    """Number of tokens of which any character belongs to the reasoning.

    A token without text, such as a part of a character, has the place of the next character. Tokens wait
    until the parser has read their text, because they may be the beginning of a delimiter.
    """

    __slots__ = ("_waiting", "num_tokens")

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, int]] = deque()
        self.num_tokens = 0

    def add(self, begin: int, progress: ReadProgress) -> None:
        """Add a token whose text begins at `begin`. `progress` is that of the parser, which has its text."""
        if not self._waiting and progress.num_read == progress.num_put > begin >= progress.reasoning_end:
            return  # most tokens are read at once and belong to the content
        self._waiting.append((begin, max(progress.num_put, begin + 1)))
        self.update(progress)

    def update(self, progress: ReadProgress) -> None:
        """Count tokens that were read."""
        while self._waiting:
            begin, end = self._waiting[0]
            is_reasoning = begin < progress.reasoning_end and end > progress.reasoning_begin
            if not is_reasoning and end > progress.num_read:
                return
            self._waiting.popleft()
            self.num_tokens += is_reasoning
