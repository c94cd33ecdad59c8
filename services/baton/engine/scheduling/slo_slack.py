"""What a step may take so that the promises of time between tokens are kept.

A promise is of the mean over an answer, so what counts is its end: an answer whose tokens come faster than
promised can wait, now and then, while a prompt is computed in one go, and prompts are done sooner. How long
it can wait in all is its laxity, as in least-laxity-first scheduling. It shrinks by each wait, so what is
lent is always a part of what is left.
"""

from collections.abc import Iterable
from math import inf

from baton.engine.state.sequence import EngineSequence

KEPT_PART = 0.9
"""Others may wait for an answer until it would take so much of what was promised: its tokens have a way to go
from here, and a step may take longer than it should. One that is beyond that is helped for as long as the
promise itself can be kept."""
LENT_PART = 0.25
"""One step takes so much of the least laxity: other prompts will come, and more answers make each step
longer."""
SURE_PART = 0.25
"""Of an answer that may end by itself so much of a mean answer is counted as still to come: the rest may not
be there to make up in. A guess; the part that is lent is what was compared, in the simulation and on a
machine."""


def token_came(seq: EngineSequence, now_s: float) -> None:
    """One of its tokens came at `now_s`; the next is due a promised time later, or after the one that was due
    now. Of an answer whose first token another worker made, the time begins when its KV is here."""
    promised_s = KEPT_PART * seq.request.tpot_slo_s
    if promised_s:
        seq.due_s = (seq.due_s or now_s) + promised_s


def limit_s(
    decoding: Iterable[EngineSequence],
    now_s: float,
    decode_s: float,
    *,
    later_s: float,
    mean_output_tokens: float,
    max_model_len: int,
) -> float:
    """What the next step may take beside these; 0 where one was promised nothing, or nobody can spare
    anything. A promise that cannot be kept any more, not even in steps without prompts, holds up nobody.
    `decode_s`: what a step without a prompt takes; `later_s`: what one takes with the part that prompts
    always get (`StepBeside.least_s`): in steps of that length a wait has to be made up for. Not with what the
    queue of the moment gets: it ends, and the longer it is, the less a step would take. `mean_output_tokens`:
    of the answers that ended here lately, 0 if none did."""
    least_s = inf
    for seq in decoding:
        promised_s = seq.request.tpot_slo_s
        if not promised_s:
            return 0.0
        if not seq.due_s:  # what is left of its prompt is one token
            continue
        most = max(1, min(seq.request.sampling.max_tokens - seq.num_output_tokens, max_model_len - len(seq.token_ids)))
        ahead_s = seq.due_s - now_s - decode_s
        kept_back_s = (1 - KEPT_PART) * promised_s * (seq.num_output_tokens + most - 1)
        if ahead_s + (most - 1) * (KEPT_PART * promised_s - decode_s) + kept_back_s <= 0:
            continue
        gain_s = min(KEPT_PART * promised_s - decode_s, max(0.0, KEPT_PART * promised_s - later_s))
        least_s = min(least_s, max(0.0, ahead_s + (_sure_tokens(seq, most, mean_output_tokens) - 1) * gain_s))
    return 0.0 if least_s in (0.0, inf) else decode_s + LENT_PART * least_s


def _sure_tokens(seq: EngineSequence, most: int, mean_output_tokens: float) -> float:
    """How many of its at most `most` tokens are counted on: in them it can make up for a wait."""
    sampling = seq.request.sampling
    if sampling.ignore_eos and not sampling.stop_token_ids:
        return most
    return min(most, max(1.0, SURE_PART * mean_output_tokens, sampling.min_tokens - seq.num_output_tokens))
