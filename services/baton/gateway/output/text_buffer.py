"""Text that is collected in small pieces."""

_PIECES_PER_CHUNK = 256


class TextBuffer:
    """Collects pieces of text, such as the text of single tokens, in about the memory of the joined text.

    A list of small strings takes fifteen times as much.
    """

    __slots__ = ("_chunks", "_pieces")

    def __init__(self, text: str = "") -> None:
        """Create a buffer that begins with `text`."""
        self._chunks: list[str] = [text] if text else []
        self._pieces: list[str] = []

    def append(self, text: str) -> None:
        """Add a piece of text."""
        self._pieces.append(text)
        if len(self._pieces) >= _PIECES_PER_CHUNK:
            self._chunks.append("".join(self._pieces))
            self._pieces.clear()

    def clear(self) -> None:
        """Drop the text."""
        self._chunks.clear()
        self._pieces.clear()

    def joined(self) -> str:
        """Return the whole text."""
        return "".join([*self._chunks, *self._pieces])
