"""Collects the parts of one message, trims whitespace beside delimiters, and gives calls numbers and ids."""

import hashlib
import re
import string

from baton.core.client_api import MessagePart, PartKind
from baton.gateway.output.formats import ContentForm, ParserOptions
from baton.gateway.output.text_buffer import TextBuffer

_ID = re.compile(r"[A-Za-z0-9_.:\-]{1,64}")
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
_BASE62 = string.digits + string.ascii_letters


class Trimmer:
    """Drops whitespace beside delimiters from text that arrives in pieces.

    Whitespace between two pieces of kept text is kept, even if a delimiter stood between them.
    """

    __slots__ = ("_after_delimiter", "_drop_end", "_keeps_end", "_pending", "_started", "_strip")

    def __init__(self, *, strip: bool, keeps_end: bool = False) -> None:
        """Create a trimmer.

        strip: drops whitespace also at the beginning and the end of the message.
        keeps_end: drops whitespace only before the first other character.
        """
        self._strip = strip
        self._keeps_end = keeps_end
        self._after_delimiter = strip
        self._drop_end = strip
        self._started = False
        self._pending = TextBuffer()

    def put(self, text: str) -> str:
        """Add text. Return what is certain to be kept."""
        if not self._started and self._after_delimiter:
            text = text.lstrip()
        if not text:
            return ""
        kept = text if self._keeps_end else text.rstrip()
        if not kept:
            self._pending.append(text)
            return ""
        result = self._pending.joined() + kept
        self._pending = TextBuffer(text[len(kept) :])
        self._started = True
        self._drop_end = self._strip
        return result

    def delimiter(self) -> None:
        """Record a delimiter at this place."""
        self._after_delimiter = self._drop_end = True
        if not self._started:
            self._pending = TextBuffer()

    def finish(self) -> str:
        """Return the whitespace at the end that is to be kept."""
        return "" if self._drop_end else self._pending.joined()


class PartSink:
    """Parts of one message that were parsed and not taken yet."""

    __slots__ = (
        "_content",
        "_form",
        "_ids",
        "_parts",
        "_reasoning",
        "_seed",
        "_short_ids",
        "_single_call",
        "_text",
        "is_complete",
        "num_calls",
    )

    def __init__(self, options: ParserOptions, *, short_ids: bool = False) -> None:
        """Create a sink. The text around the reasoning is stripped, that around free content only beside
        delimiters."""
        self._seed = options.call_id_seed
        self._form = options.content
        self._single_call = options.single_call
        self._short_ids = short_ids
        self._content = Trimmer(strip=False)
        self._reasoning = Trimmer(strip=True)
        self._ids: set[str] = set()
        self._parts: list[MessagePart] = []
        self._text: list[str] = []
        self.num_calls = 0
        self.is_complete = False
        """True if the only call is complete. Further parts are dropped."""

    def content(self, text: str) -> None:
        """Add content."""
        self._put(PartKind.CONTENT, self._content.put(text) if self._form is ContentForm.FREE else text)

    def end_content(self) -> None:
        """Drop further content, because the rest of the message is calls."""
        self._form = ContentForm.NONE

    def reasoning(self, text: str) -> None:
        """Add reasoning."""
        self._put(PartKind.REASONING, self._reasoning.put(text))

    def text(self, kind: PartKind, text: str) -> None:
        """Add content or reasoning without trimming it."""
        self._put(kind, text)

    def delimiter(self) -> None:
        """Record a delimiter at this place. Whitespace beside it is dropped."""
        self._content.delimiter()

    def call(self, name: str, call_id: str = "") -> None:
        """Begin a call. `call_id` is the model's own id, which is used if it is valid and new."""
        if self._single_call and self.num_calls:
            self.is_complete = True
            return
        self.delimiter()
        valid = _SHORT_ID if self._short_ids else _ID
        if not valid.fullmatch(call_id) or call_id in self._ids:
            call_id = make_call_id(self._seed, self.num_calls, short=self._short_ids)
        self._ids.add(call_id)
        self._join()
        self._parts.append(MessagePart(kind=PartKind.TOOL_CALL, text=name, call_index=self.num_calls, call_id=call_id))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """Add to the arguments of the call that began last."""
        self._put(PartKind.TOOL_ARGUMENTS, text)

    def end_call(self) -> None:
        """End the call that began last."""
        self.is_complete = self._single_call

    def take(self) -> tuple[MessagePart, ...]:
        """Return the new parts. Successive parts of one kind are joined."""
        if not self._parts:
            return ()
        self._join()
        parts = tuple(self._parts)
        self._parts.clear()
        return parts

    def drop_text(self) -> None:
        """Drop new content and reasoning, which the prompt has. A call that the prompt begins stays."""
        self._join()
        self._parts = [part for part in self._parts if part.kind in (PartKind.TOOL_CALL, PartKind.TOOL_ARGUMENTS)]

    def finish(self) -> tuple[MessagePart, ...]:
        """Return the last parts, with whitespace that was held back."""
        self._put(PartKind.CONTENT, self._content.finish())
        return self.take()

    def _put(self, kind: PartKind, text: str) -> None:
        if not text or self.is_complete or (kind is PartKind.CONTENT and self._form is ContentForm.NONE):
            return
        if self._parts and self._parts[-1].kind is kind:
            self._text.append(text)
            return
        self._join()
        index = self.num_calls - 1 if kind is PartKind.TOOL_ARGUMENTS else 0
        self._parts.append(MessagePart(kind=kind, text=text, call_index=index))

    def _join(self) -> None:
        """Complete the last part with the text that was added to it."""
        if self._text:
            last = self._parts[-1]
            self._parts[-1] = MessagePart(
                kind=last.kind, text=last.text + "".join(self._text), call_index=last.call_index
            )
            self._text.clear()


def make_call_id(seed: str, index: int, *, short: bool = False) -> str:
    """Return the id of call number `index`: `call_` and 24 hex digits, or 9 letters and digits."""
    digest = hashlib.sha256(f"{seed}/{index}".encode("utf-8", "surrogatepass")).digest()
    if not short:
        return "call_" + digest[:12].hex()
    number = int.from_bytes(digest[:16], "big")
    digits = []
    for _ in range(9):
        number, digit = divmod(number, len(_BASE62))
        digits.append(_BASE62[digit])
    return "".join(digits)
