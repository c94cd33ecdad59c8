"""Parses messages by a response template."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from baton.core.client_api import MessagePart
from baton.core.request import FinishReason
from baton.gateway.output.formats import MessageParser, MessageTemplate, ParserOptions, Piece, ReadProgress
from baton.gateway.output.part_sink import PartSink
from baton.gateway.output.special_text import split_special
from baton.gateway.output.templates.pattern_scan import MAX_DELIMITER, Match, PatternScan
from baton.gateway.output.templates.regions import Region, Regions
from baton.gateway.output.templates.response_template import CompiledTemplate, FieldTemplate, ResponseTemplate
from baton.gateway.output.text_buffer import TextBuffer

MAX_PREFIX = 4096
"""Longest beginning of the message in a prompt that is read. Of a longer one the middle is left out."""
_MAX_PROMPT = 64 * 1024
_OUTSIDE, _IN_CONTENT = "", " "
"""Keys of the delimiters that count outside of explicit regions, and in constrained content."""


@dataclass(frozen=True, slots=True)
class TemplateFormat(MessageTemplate):
    """Implements `MessageTemplate` by a response template."""

    template: ResponseTemplate

    def parser(self, options: ParserOptions) -> MessageParser:
        return TemplateParser(self.template, options)


class TemplateParser(MessageParser):
    """Parser for the regions of a response template.

    Between explicit regions the text belongs to the implicit field, and without one it is dropped. The texts
    of several regions of a field are joined, because parts cannot be retracted. `transformers` keeps the
    last. Constrained content goes on to the end of the message: no other region begins in it.
    """

    def __init__(self, template: ResponseTemplate, options: ParserOptions) -> None:
        """Create the parser of one sample."""
        self._format = template
        self._template = template.compiled(options.special_tokens)
        self._special = self._template.special
        self._sink = PartSink(options)
        self._regions = Regions(self._sink, self._special, options)
        self._text = ""
        self._num_read = 0
        self._is_whole = options.content.is_whole
        self._in_content = False  # constrained content has begun
        self._reasoning = (0, 0)  # place of the last reasoning that was read
        self._begins = True  # nothing was removed from the beginning of the text
        self._scans = _scans(self._template)
        self._field: FieldTemplate | None = self._template.implicit
        self._region: Region | None = None  # None: the implicit field has no text yet
        self._is_explicit = False
        self._recorded: TextBuffer | None = None  # text of the region, while a prompt is read
        self._opening: tuple[str, Mapping[str, str]] = ("", {})
        anchors = [found.end() for found in self._template.start_anchor.finditer(options.prompt[-_MAX_PROMPT:])]
        if anchors:
            self._restore(
                _state_after(self._format, options.special_tokens, options.prompt[-_MAX_PROMPT:][anchors[-1] :])
            )

    @property
    def num_calls(self) -> int:
        return self._sink.num_calls

    @property
    def is_complete(self) -> bool:
        return self._sink.is_complete

    @property
    def progress(self) -> ReadProgress:
        return ReadProgress(self._num_read + len(self._text), self._num_read, *self._reasoning)

    def put(self, piece: Piece) -> tuple[MessagePart, ...]:
        text = self._special.encode(piece)
        if not text:
            return ()
        self._text += text
        self._process(final=False)
        return self._sink.take()

    def finish(self, reason: FinishReason) -> tuple[MessagePart, ...]:
        self._process(final=True, truncated=reason is FinishReason.LENGTH)
        return self._sink.finish()

    def close(self) -> None:
        if self._region is not None:
            self._region.drop()
            self._region = None

    def read_prefix(self, prefix: str, special_tokens: frozenset[str]) -> "PromptState":
        """Read the beginning of a message in a prompt, and return where it ends."""
        self._recorded = TextBuffer()
        self._text = "".join(map(self._special.encode, split_special(prefix, special_tokens)))
        self._process(final=False)
        return PromptState(
            field=self._field,
            is_explicit=self._is_explicit,
            opening=self._opening,
            body=self._recorded.joined(),
            text=self._text,
            begins=self._begins,
            joined=frozenset(self._regions.joined),
        )

    def _restore(self, state: "PromptState") -> None:
        """Go on where a prompt ends. Its text is not part of the output, but a call that it begins is."""
        self._field, self._is_explicit = state.field, state.is_explicit
        self._text, self._begins, self._opening = state.text, state.begins, state.opening
        self._regions.joined = set(state.joined)
        if state.is_explicit and state.field is not None:
            self._region = self._regions.region(state.field, *state.opening)
        self._put(state.body)
        self._reasoning = (0, 0)
        self._process(final=False)
        self._sink.drop_text()

    def _process(self, *, final: bool, truncated: bool = False) -> None:
        while True:
            found, hold = self._next(final=final)
            if self._begins_content(hold if found is None else found[2].start):
                self._restart_scans()
                continue
            if found is None:
                break
            field, opens, match = found
            self._put(self._text[: match.start])
            delimiter = self._text[match.start : match.end]
            if opens:
                self._close("")
                self._field, self._is_explicit = field, True
                self._opening = delimiter, match.groups
                self._region = self._regions.region(field, *self._opening)
            else:
                self._close(delimiter)
            self._remove(match.end)
            self._restart_scans()
        self._regions.is_cut = truncated
        self._put(self._text[:hold])
        if final:
            self._close("")
        self._remove(hold)
        for _, _, scan in self._watched():
            scan.shift(hold)

    def _watched(self) -> Sequence[tuple[FieldTemplate, bool, PatternScan]]:
        """Return the delimiters that count now: field, True if it opens the field's region, and search."""
        if self._field is not None and self._is_explicit:
            return self._scans[self._field.name]
        return self._scans[_IN_CONTENT if self._in_content else _OUTSIDE]

    def _begins_content(self, end: int) -> bool:
        """Return True if constrained content begins before this position. It is not searched for regions."""
        may_begin = self._is_whole and not self._in_content and not self._is_explicit
        self._in_content |= may_begin and self._regions.is_content(self._field) and bool(self._text[:end].strip())
        return may_begin and self._in_content

    def _restart_scans(self) -> None:
        for _, _, scan in self._watched():
            scan.restart(0)

    def _next(self, *, final: bool) -> tuple[tuple[FieldTemplate, bool, Match] | None, int]:
        """Return the next delimiter if it is certain, and the position up to which the text is."""
        best: tuple[FieldTemplate, bool, Match] | None = None
        hold = len(self._text)
        for field, opens, scan in self._watched():
            limit = None if best is None else best[2].start
            scan.run(self._text, begins=self._begins, final=final, limit=limit)
            if scan.pending is not None:
                hold = min(hold, scan.pending)
            elif scan.is_decided and scan.match is not None:
                match = scan.match
                if match.start == match.end == len(self._text):
                    continue  # the end of the text closes the region anyway
                if best is None or _order(field, opens, match) < _order(*best):
                    best = field, opens, match
        return (None if best is not None and best[2].start >= hold else best), hold

    def _put(self, text: str) -> None:
        if not text or self._field is None:
            return
        if self._region is None:
            self._region = self._regions.region(self._field, "", {})
        if self._recorded is not None:
            self._recorded.append(text)
        if self._regions.is_reasoning(self._field):
            begin = self._reasoning[0] if self._reasoning[1] == self._num_read else self._num_read
            self._reasoning = (begin, self._num_read + len(text))
        self._region.put(text)

    def _close(self, delimiter: str) -> None:
        """Close the region and return to the implicit field."""
        if self._region is not None:
            self._region.close(delimiter)
        self._region = None
        self._field, self._is_explicit = self._template.implicit, False
        if self._recorded is not None:
            self._recorded.clear()

    def _remove(self, count: int) -> None:
        if count:
            self._text = self._text[count:]
            self._num_read += count
            self._begins = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptState:
    """State of a parser at the end of a prompt.

    body: text of the region so far. text: text that may begin a delimiter.
    """

    field: FieldTemplate | None
    is_explicit: bool
    opening: tuple[str, Mapping[str, str]]
    body: str
    text: str
    begins: bool
    joined: frozenset[str]


@lru_cache(maxsize=16)  # all samples of a request have one prompt
def _state_after(template: ResponseTemplate, special_tokens: frozenset[str], prefix: str) -> PromptState:
    if len(prefix) > MAX_PREFIX:
        prefix = prefix[: MAX_PREFIX // 2] + prefix[-MAX_PREFIX // 2 :]
    return TemplateParser(template, ParserOptions(special_tokens=special_tokens)).read_prefix(prefix, special_tokens)


def _order(field: FieldTemplate, opens: bool, match: Match) -> tuple[int, int, bool, str]:
    return match.start, match.start - match.end, not opens, field.name


def _scans(template: CompiledTemplate) -> Mapping[str, Sequence[tuple[FieldTemplate, bool, PatternScan]]]:
    """Return the delimiters that count in each explicit region, and outside of these."""
    fields = {field.name: field for field in template.fields}
    scans = {
        name: [(field, False, PatternScan(template.closes[name], MAX_DELIMITER))] if name in template.closes else []
        for name, field in fields.items()
        if field.open
    }
    outside = [(fields[name], True, PatternScan(pattern, MAX_DELIMITER)) for name, pattern in template.opens.items()]
    implicit = template.implicit
    if implicit is not None and implicit.close:
        outside.append((implicit, False, PatternScan(template.closes[implicit.name], MAX_DELIMITER)))
    return {**scans, _OUTSIDE: outside, _IN_CONTENT: [scan for scan in outside if not scan[1]]}
