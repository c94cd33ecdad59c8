"""Builds the text of one sample, and ends it at a stop string."""

from baton.core.client_api import MessagePart
from baton.core.request import FinishReason
from baton.gateway.text.detokenizer import Detokenizer
from baton.gateway.text.stop_strings import StopMatcher, StopPatterns


class TextSample:
    """One sample of a completion, or of a chat whose answers are not parsed. Implements `SampleOutput`."""

    __slots__ = ("_detokenizer", "_min_tokens", "_stops", "_text", "num_tokens")

    num_reasoning_tokens = 0
    num_calls = 0

    def __init__(self, detokenizer: Detokenizer, stops: StopPatterns, min_tokens: int) -> None:
        self._detokenizer = detokenizer
        self._stops = StopMatcher(stops) if stops else None
        self._min_tokens = min_tokens
        self._text = ""
        self.num_tokens = 0

    @property
    def stop_string(self) -> str:
        return self._stops.found if self._stops else ""

    def put(self, token_id: int) -> bool:
        self.num_tokens += 1
        text = self._detokenizer.put(token_id)
        if self._stops is None:
            self._text += text
            return False
        if self.num_tokens < self._min_tokens:
            self._text += self._stops.pass_through(text)
            return False
        text, found = self._stops.put(text)
        self._text += text
        return found

    def put_stop_token(self, token_id: int) -> bool:
        self.num_tokens += 1
        return False

    def finish(self, reason: FinishReason) -> bool:
        text = self._detokenizer.flush()
        if self._stops is None:
            self._text += text
            return False
        text, found = self._stops.put(text)
        self._text += text if found else text + self._stops.flush()
        return found

    def close(self) -> None:
        """Do nothing; the text is held by this object alone."""

    def take(self) -> tuple[str, tuple[MessagePart, ...]]:
        text, self._text = self._text, ""
        return text, ()
