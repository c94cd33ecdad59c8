"""Draws the tokens of a step row by row, for devices without a model."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from baton.core.errors import Failure
from baton.engine.constraints.token_bits import Bits
from baton.engine.constraints.token_constraints import TokenConstraints
from baton.engine.state.draft_rows import rows_of, verified
from baton.engine.state.step import SampledToken, SampleRequest, StepPlan, StepSequence

Draw = Callable[[StepSequence, SampleRequest, Bits | None], tuple[SampledToken, ...]]
"""Draws the tokens of one row, whose KV ends at the position of its request. The last argument has the tokens
that it may draw; None allows all."""


@dataclass(frozen=True, slots=True)
class SampledRows:
    """The rows of one sequence that samples: a row for its last token, and one for each draft."""

    sequence: StepSequence
    requests: Sequence[SampleRequest]

    def final_context_len(self, tokens: Sequence[SampledToken]) -> int:
        """Return the number of KV entries that are final if the sequence got these tokens, maybe none."""
        num_positions = min(1, len(tokens)) if len(self.requests) == 1 else len(tokens)
        return self.sequence.context_len - len(self.requests) + num_positions


@dataclass(frozen=True, slots=True)
class DrawnRows:
    """Tokens, failures and forced tokens by sequence, as in `StepResult`."""

    samples: dict[int, tuple[SampledToken, ...]] = field(default_factory=dict)
    failures: dict[int, Failure] = field(default_factory=dict)
    forced: dict[int, tuple[int, ...]] = field(default_factory=dict)


def sampled_rows(plan: StepPlan) -> list[SampledRows]:
    """Return the rows of each sequence of a plan that samples."""
    return [SampledRows(one, rows_of(one.sample)) for one in plan.sequences if one.sample is not None]


def draw_rows(rows: Sequence[SampledRows], constraints: TokenConstraints, draw: Draw) -> DrawnRows:
    """Draw the tokens of all sequences. Those of rows after a wrong draft are not drawn.

    constraints: computes the masks of constrained sequences.
    """
    masks = constraints.masks([(one.sequence.seq_id, request) for one in rows for request in one.requests])
    drawn, allowed, begin = DrawnRows(), masks.by_row(), 0

    def tokens_of(one: SampledRows, begin: int) -> Iterator[SampledToken | None]:
        for row, request in enumerate(one.requests, begin):
            if row in masks.failures or row in masks.deferred:
                yield None
            else:
                yield from draw(one.sequence, request, allowed.get(row))

    for one in rows:
        seq_id, drafts = one.sequence.seq_id, one.requests[0].drafts
        if (failure := masks.failures.get(begin)) is not None:
            drawn.failures[seq_id] = failure
        else:
            found = tokens_of(one, begin)
            tokens = verified(drafts, found) if drafts else tuple(token for token in found if token is not None)
            drawn.samples[seq_id] = tokens
        begin += len(one.requests)
    drawn.forced.update(
        constraints.forced_after(
            (one.sequence.seq_id, one.requests[0], drawn.samples.get(one.sequence.seq_id, ())) for one in rows
        )
    )
    return drawn
