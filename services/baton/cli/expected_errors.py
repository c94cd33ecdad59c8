"""Which errors Baton raised on purpose, to be told in one line, and which are bugs, to be told with a
traceback."""

from baton.core.errors import BatonError


def on_purpose(error: BaseException) -> BatonError | None:
    """The error to tell, of a group the first, which is what made the others end. None where it, or any in
    the group, was not meant."""
    if isinstance(error, BaseExceptionGroup):
        told = [on_purpose(each) for each in error.exceptions]
        return told[0] if all(told) else None
    return error if isinstance(error, BatonError) else None
