"""Synthetic workloads: independent prompts, shared system prompts, and sessions of several turns.

Each function takes arrival times and distributions and returns the requests of a plan. Arrivals, lengths,
sharing and think times have separate random streams under one seed, so changing one leaves the others
unchanged. Segment ids count from 0 within a plan, shared ones first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from loadgen.loadgen_errors import BadPlan, EmptyPlan
from loadgen.plan import draws
from loadgen.plan.arrivals import poisson
from loadgen.plan.draws import Floats
from loadgen.plan.lengths import Distribution, Fixed, draw_lengths
from loadgen.plan.plan import AnswerOf, Generated, Plan, PlannedRequest, Segment, Vocabulary
from loadgen.slo_target import SloTarget


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrompts:
    """System prompts that requests or sessions begin with.

    Each client gets one of `count`, the r-th with probability proportional to `1 / r^zipf` (0 is uniform).
    `lengths` is drawn once for each system prompt.
    """

    count: int
    lengths: Distribution
    zipf: float = 1.0

    def draw(self, seed: int, count: int) -> list[Generated]:
        """Return the system prompt of each of `count` clients."""
        lengths = draw_lengths(self.lengths, draws.stream(seed, "shared lengths"), self.count).tolist()
        prompts = [Generated(segment_id=group, num_tokens=length) for group, length in enumerate(lengths)]
        groups = draws.choose(draws.stream(seed, "sharing"), draws.zipf_weights(self.count, self.zipf).tolist(), count)
        return [prompts[group] for group in groups]


def random_prompts(
    times_s: Floats, *, inputs: Distribution, outputs: Distribution, seed: int, shared: SharedPrompts | None = None
) -> list[PlannedRequest]:
    """Return one request for each time: a system prompt if `shared` is given, then `inputs` unique tokens."""
    count = len(times_s)
    num_inputs = draw_lengths(inputs, draws.stream(seed, "input"), count).tolist()
    num_outputs = draw_lengths(outputs, draws.stream(seed, "output"), count).tolist()
    prefixes = _system_prompts(shared, seed, count)
    first_id = 0 if shared is None else shared.count
    return [
        PlannedRequest(
            index=index,
            at_s=at_s,
            segments=(*prefixes[index], Generated(segment_id=first_id + index, num_tokens=num_inputs[index])),
            output_tokens=num_outputs[index],
        )
        for index, at_s in enumerate(times_s.tolist())
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionShape:
    """Distributions of a session.

    - `count`: number of turns
    - `think`: seconds between the end of a response and the next turn
    - `first_inputs`, `later_inputs`: the user's tokens in the first and in each later turn
    - `max_context`: the session ends before a turn whose prompt and response would exceed this
    """

    count: Distribution
    think: Distribution
    first_inputs: Distribution
    later_inputs: Distribution
    outputs: Distribution
    max_context: int | None = None


def sessions(
    times_s: Floats, turns: SessionShape, *, seed: int, shared: SharedPrompts | None = None
) -> list[PlannedRequest]:
    """Return the requests of sessions that arrive at `times_s`.

    The workload is partly open: sessions arrive independently of the server, but each turn follows the
    response to the previous one. A later turn's prompt is the previous prompt, its response, and new tokens.
    Requests are in order of time, as if responses took no time.
    """
    count = len(times_s)
    num_turns = draw_lengths(turns.count, draws.stream(seed, "turns"), count).tolist()
    total = sum(num_turns)
    firsts = draw_lengths(turns.first_inputs, draws.stream(seed, "input"), count).tolist()
    laters = iter(draw_lengths(turns.later_inputs, draws.stream(seed, "later input"), total - count).tolist())
    thinks = iter(np.round(turns.think.draw(draws.stream(seed, "think"), total - count), 6).tolist())
    outputs = iter(draw_lengths(turns.outputs, draws.stream(seed, "output"), total).tolist())
    prompts = _system_prompts(shared, seed, count)
    segment_id = 0 if shared is None else shared.count

    drafts: list[Turn] = []
    for session, at_s in enumerate(times_s.tolist()):
        num_context = sum(prompt.num_tokens for prompt in prompts[session])
        is_over = False
        for turn in range(num_turns[session]):
            num_new = firsts[session] if turn == 0 else next(laters)
            think_s = 0.0 if turn == 0 else next(thinks)
            num_output = next(outputs)
            at_s += think_s
            num_context += num_new + num_output
            is_over = is_over or (turns.max_context is not None and num_context > turns.max_context)
            if is_over:
                if turn == 0:
                    raise BadPlan(
                        f"session {session} has {num_context} tokens in its first turn, above --max-context "
                        f"({turns.max_context}); "
                        "give shorter lengths, for example with max=…"
                    )
                continue  # the numbers are drawn anyway, so that later sessions do not change
            new = Generated(segment_id=segment_id, num_tokens=num_new)
            drafts.append(
                Turn(at_s=at_s, session=session, turn=turn, think_s=think_s, new=(new,), num_output=num_output)
            )
            segment_id += 1
    return in_order(drafts, times_s.tolist(), prompts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A request before it is ordered into the plan.

    - `at_s`: when it is due if responses take no time
    - `new`: what its prompt adds to the previous turn's
    - `answer`: what later turns contain as its response; empty for the server's own
    """

    at_s: float
    session: int
    turn: int
    think_s: float
    new: tuple[Segment, ...]
    num_output: int
    answer: tuple[Segment, ...] = ()


def _system_prompts(shared: SharedPrompts | None, seed: int, count: int) -> list[tuple[Generated, ...]]:
    """Return the first segments of the prompts of each of `count` clients."""
    return [()] * count if shared is None else [(prompt,) for prompt in shared.draw(seed, count)]


def in_order(
    turns: Sequence[Turn], times_s: Sequence[float], system_prompts: Sequence[tuple[Segment, ...]]
) -> list[PlannedRequest]:
    """Return the turns as a plan's requests in order of time.

    `times_s` and `system_prompts` have the arrival and the common start of all prompts of each session.
    """
    prompts = list(system_prompts)
    latest: dict[int, int] = {}  # of each session, the index of its latest turn
    requests: list[PlannedRequest] = []
    for index, turn in enumerate(sorted(turns, key=lambda turn: (turn.at_s, turn.session, turn.turn))):
        after = latest.get(turn.session)
        prompts[turn.session] = (*prompts[turn.session], *turn.new)
        requests.append(
            PlannedRequest(
                index=index,
                at_s=times_s[turn.session] if after is None else None,
                after=after,
                think_s=turn.think_s,
                session=f"s{turn.session}",
                turn=turn.turn,
                segments=prompts[turn.session],
                output_tokens=turn.num_output,
            )
        )
        prompts[turn.session] += turn.answer or (AnswerOf(index=index),)
        latest[turn.session] = index
    return requests


DEFAULT_VOCABULARY = Vocabulary(low=1000, high=4096)
"""Token ids for an unknown tokenizer.

They are ordinary text in every tokenizer known to us: special tokens have ids below 1,000 or at the end.
"""


def simple_plan(
    *,
    rate_rps: float,
    seconds: float,
    input_tokens: int,
    output_tokens: int,
    seed: int = 0,
    slo: SloTarget | None = None,
    vocabulary: Vocabulary = DEFAULT_VOCABULARY,
) -> Plan:
    """Return a plan of Poisson arrivals with random prompts of one length. Its name has the seed.

    Raises BadPlan if no request arrives.
    """
    times_s = poisson(draws.stream(seed, "arrivals"), rate_rps=rate_rps, until_s=seconds)
    if not len(times_s):
        raise EmptyPlan(
            f"no request arrives in {seconds:g} s at {rate_rps:g} requests/s with seed {seed}; give a longer time "
            "or a higher rate"
        )
    requests = random_prompts(times_s, inputs=Fixed(input_tokens), outputs=Fixed(output_tokens), seed=seed)
    return Plan(
        name=f"{rate_rps:g}rps-{input_tokens}in-{output_tokens}out-seed{seed}",
        seed=seed,
        vocabulary=vocabulary,
        requests=tuple(requests),
        slos={"default": slo or SloTarget()},
        made_by={
            "source": "random",
            "rate": f"{rate_rps:g}",
            "seconds": seconds,
            "input": str(input_tokens),
            "output": str(output_tokens),
        },
    )
