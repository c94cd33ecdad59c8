"""Formats token ids as JSON, many of them in a thread.

A prompt may have a million ids, which take 0.1 s. The prompt of a call is formatted once, although each of
its choices may repeat it.
"""

from baton.core.kv.block_hash import TokenIds
from baton.gateway.input.client_call import ClientCall
from baton.runtime.process import loop_time

IDS_PER_PIECE = 8 * 1024
"""Ids that are formatted in one call, during which no other thread runs."""


def format_ids(ids: TokenIds) -> str:
    """Return the JSON list of token ids."""
    pieces = (str(ids[at : at + IDS_PER_PIECE].tolist())[1:-1] for at in range(0, len(ids), IDS_PER_PIECE))
    return f"[{', '.join(pieces)}]"


async def format_many_ids(*lists: TokenIds) -> tuple[str, ...]:
    """Return the JSON list of each. Many ids do not block the event loop."""
    return await loop_time.call(sum(map(len, lists)), loop_time.JSON_IDS, lambda: tuple(map(format_ids, lists)))


async def repeated_prompts(call: ClientCall) -> tuple[str, ...]:
    """Return the token ids of each prompt as JSON; nothing if the response does not repeat them."""
    if not call.output_options.return_token_ids:
        return ()
    return await format_many_ids(*(request.token_ids for request in call.requests))
