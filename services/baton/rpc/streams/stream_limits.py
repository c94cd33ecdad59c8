"""Buffer limits and timeouts of the streams of a process."""

from dataclasses import dataclass

from baton.runtime.process.byte_budget import Account, ByteBudget
from baton.runtime.process.shared_account import SharedAccount


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamLimits:
    """Buffer limits and the close timeout of a stream.

    max_messages, max_bytes: limits of the send buffer; exceeding one breaks the stream.
    max_received, max_received_bytes: received messages that may wait for the user; then reading pauses.
    buffers: account of the buffers of all streams of the process. If it is full, the stream with the most
        bytes breaks. None: there is no common limit.
    close_s: time that a closing end waits until sent messages are flushed and the other end has closed.
    """

    max_messages: int = 4096
    max_bytes: int = 64 * 2**20
    max_received: int = 64
    max_received_bytes: int = 2**20
    close_s: float = 1.0
    buffers: SharedAccount | None = None


def stream_limits(budget: ByteBudget) -> StreamLimits:
    """Return the limits of the streams of a process, whose buffers take the account `STREAMS`."""
    return StreamLimits(buffers=SharedAccount(budget, Account.STREAMS, "the stream"))
