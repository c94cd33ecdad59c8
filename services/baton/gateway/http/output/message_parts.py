"""The parts of a message as JSON text, in the order in which a model writes them."""

from collections.abc import Sequence

from baton.core.client_api import ChoiceDelta, MessagePart, PartKind


def parts_of(choice: ChoiceDelta) -> Sequence[MessagePart]:
    """Return the parts of new output. Text of a request without a message format is content."""
    if choice.parts or not choice.text:
        return choice.parts
    return (MessagePart(kind=PartKind.CONTENT, text=choice.text),)


def continues(part: MessagePart, kind: PartKind, call_index: int) -> bool:
    """True if a part belongs to the item of this kind, the call of this index."""
    if part.kind is PartKind.TOOL_ARGUMENTS:
        return kind is PartKind.TOOL_CALL and part.call_index == call_index
    return part.kind is kind and kind is not PartKind.TOOL_CALL
