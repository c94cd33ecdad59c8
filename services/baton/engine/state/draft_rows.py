"""Verification of draft tokens: the rows of a sequence with drafts, and which of their tokens count.

A sequence with drafts computes its last token and k drafts in one step, and draws k + 1 tokens from their k +
1 rows of logits. Row i is drawn as if the first i drafts were output tokens: position, penalties, banned
tokens and masks are those of that response. A token counts if every draft before it equals the token that was
drawn in its place. So the tokens are those that k + 1 steps without drafts would have drawn, and only their
number depends on the drafts.
"""

from collections.abc import Iterable, Sequence

from baton.core.kv.block_hash import token_ids
from baton.engine.state.step import SampledToken, SampleRequest

RowRequests = Sequence[tuple[int, SampleRequest]]
"""(seq_id, request) of each row of logits that draws. A row whose request has drafts continues in the next
row; the first of its drafts is the guess of its own token."""

DrawnTokens = tuple[int, SampleRequest, Sequence[SampledToken]]
"""(seq_id, request, tokens) of a sequence, and the tokens that it got in a step."""


def rows_of(request: SampleRequest) -> tuple[SampleRequest, ...]:
    """Return the request of each row of a sequence; `request` itself if it has no drafts.

    All rows share one history, which has the drafts.
    """
    drafts = request.drafts
    if not drafts:
        return (request,)
    history = request.history[: request.position] + token_ids(drafts)
    num_banned = request.sampling.min_tokens - (request.position - request.num_prompt_tokens)
    return tuple(
        SampleRequest(
            sampling=request.sampling,
            sample_indices=request.sample_indices,
            position=request.position + number,
            history=history,
            num_prompt_tokens=request.num_prompt_tokens,
            banned_token_ids=request.banned_token_ids if number == 0 or number < num_banned else (),
            drafts=drafts[number:],
        )
        for number in range(len(drafts) + 1)
    )


def row_requests(sampling: Iterable[tuple[int, SampleRequest]]) -> RowRequests:
    """Return the rows of all sequences, in order. sampling: (seq_id, request) of each sequence."""
    return [
        (seq_id, row) for seq_id, request in sampling for row in (rows_of(request) if request.drafts else (request,))
    ]


def verified(drafts: Sequence[int], drawn: Iterable[SampledToken | None]) -> tuple[SampledToken, ...]:
    """Return the tokens that count: those drawn up to the first that is not the draft in its place.

    drawn: the token of each row, None if it could not be drawn. Tokens after None do not count.
    """
    found: list[SampledToken] = []
    for number, token in enumerate(drawn):
        if token is None:
            break
        found.append(token)
        if number == len(drafts) or token.token_id != drafts[number]:
            break
    return tuple(found)
