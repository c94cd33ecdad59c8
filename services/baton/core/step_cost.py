"""The step cost model: predicts how long an engine step takes, in seconds.

The model is linear in the work of the step. It is fitted to measurements, and corrected by live steps. The
engine's step budget, the scheduler's predictions, emulated devices and the simulator all use it.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import combinations

from baton.core.plain_json import from_plain, to_plain

COSTS_VERSION = 3
"""Version of the features. The coefficients of another version have another meaning."""
NUM_FEATURES = 6

_MIN_PIVOT = 1e-9
"""A smaller pivot means that a feature is a linear combination of others."""

_CORRECTION_RATE = 0.05
_MAX_CORRECTION = 0.5
"""One step moves a log factor by at most rate x maximum, which is 2.5 %. A lasting change of all steps by 2 x
is followed within about 50 steps, while a single stall has little effect."""
_MAX_LOG_FACTOR = math.log(20.0)
_SHARED_CORRECTION = 0.8
"""Share of each correction that the factors of the other kinds take. What slows one kind of step mostly slows
all, and some kinds are not seen for a long time. It is below 1, so each kind that is seen reaches its own
value, within about 200 steps."""
_UNVERIFIED_STEPS = 500
_FORGET_RATE = 1e-3
"""Decode steps in a row without drafts, after which the factor of steps with drafts falls towards that of
steps without, and the share of the distance by which it falls with each further one. While the factor is too
high, no drafts are verified that would correct it. A factor that was right is observed again in the first
steps that verify drafts."""


class StepKind(Enum):
    """The kind of a step by its sequences. Each kind has its own correction factor (`CostCorrection`).

    VERIFY: only decodes, of which at least one has draft tokens.
    """

    PREFILL = "prefill"
    DECODE = "decode"
    VERIFY = "verify"
    MIXED = "mixed"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """The work of one step, as features of the cost model.

    num_prefill_tokens: prompt tokens to compute.
    prefill_attended_tokens: (query, context) pairs of their attention. A chunk of n tokens after c existing
        tokens has `n * c + n * (n + 1) / 2`.
    num_decode_seqs: sequences that decode, one token each.
    decode_context_tokens: sum of their context lengths.
    num_draft_tokens: draft tokens of these sequences, which the step verifies.
    draft_attended_tokens: (query, context) pairs of their attention. A pair costs as much as one of a prompt
        chunk: the rows of a sequence share what is read of its context.
    """

    num_prefill_tokens: int = 0
    prefill_attended_tokens: int = 0
    num_decode_seqs: int = 0
    decode_context_tokens: int = 0
    num_draft_tokens: int = 0
    draft_attended_tokens: int = 0

    @staticmethod
    def of(
        chunks: Iterable[tuple[int, int]],
        decode_contexts: Iterable[int] = (),
        drafts: Iterable[tuple[int, int]] = (),
    ) -> "StepWork":
        """Return the work of a step.

        chunks: (tokens, existing tokens before them) of each prefill chunk.
        decode_contexts: context length of each decoding sequence.
        drafts: (draft tokens, tokens before them) of each decoding sequence that has some.
        """
        parts = list(chunks)
        contexts = list(decode_contexts)
        verified = list(drafts)
        return StepWork(
            num_prefill_tokens=sum(num_tokens for num_tokens, _ in parts),
            prefill_attended_tokens=sum(attended_tokens(num_tokens, before) for num_tokens, before in parts),
            num_decode_seqs=len(contexts),
            decode_context_tokens=sum(contexts),
            num_draft_tokens=sum(num_tokens for num_tokens, _ in verified),
            draft_attended_tokens=sum(attended_tokens(num_tokens, before) for num_tokens, before in verified),
        )

    @property
    def without_drafts(self) -> "StepWork":
        """The work of the same step without its drafts."""
        return replace(self, num_draft_tokens=0, draft_attended_tokens=0)

    @property
    def kind(self) -> StepKind:
        """Kind of a step with this work."""
        if not self.num_prefill_tokens:
            return StepKind.VERIFY if self.num_draft_tokens else StepKind.DECODE
        return StepKind.MIXED if self.num_decode_seqs else StepKind.PREFILL

    @property
    def features(self) -> tuple[float, ...]:
        """Feature values, in the order of `StepCostModel.coefficients`."""
        return (
            1.0,
            self.num_prefill_tokens,
            self.prefill_attended_tokens + self.draft_attended_tokens,
            self.num_decode_seqs,
            self.decode_context_tokens,
            self.num_draft_tokens,
        )


def attended_tokens(num_tokens: int, num_before: int) -> int:
    """Return the number of (query, context) pairs of `num_tokens` tokens after `num_before` tokens.

    It does not depend on the number of chunks.
    """
    return num_tokens * num_before + num_tokens * (num_tokens + 1) // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCostModel:
    """Predicts the duration of a step: `step_s` plus each feature times its cost, all times the factor of its
    kind.

    step_s: cost of any step, in seconds.
    prefill_token_s, prefill_attended_s, decode_seq_s, decode_context_s: cost per unit of each feature of
        `StepWork`.
    draft_token_s: cost of verifying a draft token, in seconds. 0 if it was not measured: then a draft token
        costs as much as a decoding sequence, which is at least its cost.
    prefill_factor, decode_factor, verify_factor, mixed_factor: correction by live steps, one per `StepKind`.
    num_measured: number of measured steps that the model was fitted to.
    version: `COSTS_VERSION` of the release that made it.
    """

    step_s: float
    prefill_token_s: float
    prefill_attended_s: float
    decode_seq_s: float
    decode_context_s: float
    draft_token_s: float = 0.0
    prefill_factor: float = 1.0
    decode_factor: float = 1.0
    verify_factor: float = 1.0
    mixed_factor: float = 1.0
    num_measured: int = 0
    version: int = COSTS_VERSION

    @staticmethod
    def of(coefficients: Sequence[float], num_measured: int = 0) -> "StepCostModel":
        """Return a model with these coefficients, in the order of the property `coefficients`."""
        step_s, prefill_token_s, prefill_attended_s, decode_seq_s, decode_context_s, draft_token_s = coefficients
        return StepCostModel(
            step_s=step_s,
            prefill_token_s=prefill_token_s,
            prefill_attended_s=prefill_attended_s,
            decode_seq_s=decode_seq_s,
            decode_context_s=decode_context_s,
            draft_token_s=draft_token_s,
            num_measured=num_measured,
        )

    @property
    def coefficients(self) -> tuple[float, ...]:
        """Costs in the order of `StepWork.features`, without correction factors."""
        return (
            self.step_s,
            self.prefill_token_s,
            self.prefill_attended_s,
            self.decode_seq_s,
            self.decode_context_s,
            self.draft_token_s or self.decode_seq_s,
        )

    @property
    def is_usable(self) -> bool:
        """True if version and numbers are valid. A model may come from another process or another release."""
        factors = (self.prefill_factor, self.decode_factor, self.verify_factor, self.mixed_factor)
        numbers_are_sane = all(0 <= cost < math.inf for cost in self.coefficients) and all(
            0 < factor < math.inf for factor in factors
        )
        return numbers_are_sane and self.version == COSTS_VERSION and sum(self.coefficients) > 0

    def factor(self, kind: StepKind) -> float:
        """Return the correction factor of a kind of step."""
        return {
            StepKind.PREFILL: self.prefill_factor,
            StepKind.DECODE: self.decode_factor,
            StepKind.VERIFY: self.verify_factor,
            StepKind.MIXED: self.mixed_factor,
        }[kind]

    def uncorrected_step_s(self, work: StepWork) -> float:
        """Return the duration of a step without correction factor, in seconds."""
        return sum(cost * amount for cost, amount in zip(self.coefficients, work.features, strict=True))

    def step_seconds(self, work: StepWork) -> float:
        """Return the predicted duration of a step, in seconds."""
        return self.uncorrected_step_s(work) * self.factor(work.kind)

    def prefill_s(self, num_new_tokens: int, num_cached_tokens: int = 0, chunk_tokens: int = 512) -> float:
        """Return the time to compute `num_new_tokens` after `num_cached_tokens`, in seconds.

        The prompt is computed in steps of `chunk_tokens` tokens that contain nothing else.
        """
        num_steps = -(-num_new_tokens // max(1, chunk_tokens))
        compute_s = self.prefill_token_s * num_new_tokens + self.prefill_attended_s * attended_tokens(
            num_new_tokens, num_cached_tokens
        )
        return (self.step_s * num_steps + compute_s) * self.prefill_factor

    def decode_step_s(self, num_seqs: float, context_tokens: float) -> float:
        """Return the duration of a decode-only step without draft tokens, in seconds.

        num_seqs: sequences that decode. context_tokens: sum of their context lengths.
        """
        return (
            self.step_s + self.decode_seq_s * num_seqs + self.decode_context_s * context_tokens
        ) * self.decode_factor

    def to_plain(self) -> dict[str, object]:
        """Return the model as JSON-compatible values, for messages and the store (`core.plain_json`)."""
        plain: dict[str, object] = to_plain(self)
        return plain

    @staticmethod
    def from_plain(plain: object) -> "StepCostModel":
        """Return the model in `plain`.

        Raises ValueError if it is malformed, of another version, or not usable.
        """
        model = from_plain(StepCostModel, plain)
        if not model.is_usable:
            raise ValueError(
                f"cost model of version {model.version} with costs {model.coefficients} cannot be used; "
                f"must be of version {COSTS_VERSION} with finite costs of at least 0, not all 0: measure again"
            )
        return model


def fit_costs(measured: Sequence[tuple[StepWork, float]]) -> StepCostModel:
    """Fit a model with non-negative costs to measured (work, seconds), by least squares of the relative
    error.

    A step that was delayed by something else has little weight, because its error is relative to its own
    duration. If the measurements cannot separate features, the cost goes to few of them. Raises ValueError if
    no step with prefill or no step with decode was measured, or if a duration is not finite and positive.
    """
    if not all(0 < seconds < math.inf for _, seconds in measured):
        raise ValueError("a measured step has a duration that is not finite and above 0; measure again")
    if not any(work.num_prefill_tokens for work, _ in measured) or not any(
        work.num_decode_seqs for work, _ in measured
    ):
        raise ValueError("no step with prefill or no step with decode was measured; measure both")
    rows = [tuple(feature / seconds for feature in work.features) for work, seconds in measured]
    return StepCostModel.of(_non_negative_least_squares(rows), num_measured=len(rows))


class CostCorrection:
    """Tracks how much longer live steps take than the model predicts, with one factor per kind of step.

    It follows log(actual / predicted) like a running median. Each step moves the factor of its kind towards
    the observed ratio by a limited amount, and moves the other factors with it. Not thread-safe: only the
    worker's event loop uses it.
    """

    def __init__(self, costs: StepCostModel) -> None:
        self._costs = costs
        self._corrected: StepCostModel | None = costs
        self._log_factors = {kind: math.log(costs.factor(kind)) for kind in StepKind}
        self._num_unverified = 0  # decode steps since the last one with drafts

    def observe(self, work: StepWork, actual_s: float) -> None:
        """Record a step that took `actual_s` seconds.

        Durations that are not finite and positive are ignored.
        """
        predicted_s = self._costs.uncorrected_step_s(work)
        if not 0 < actual_s < math.inf or predicted_s <= 0:
            return
        self._corrected = None
        known = self._log_factors[work.kind]
        off = max(-_MAX_CORRECTION, min(_MAX_CORRECTION, math.log(actual_s / predicted_s) - known))
        for kind, value in self._log_factors.items():
            move = _CORRECTION_RATE * off * (1.0 if kind is work.kind else _SHARED_CORRECTION)
            self._log_factors[kind] = max(-_MAX_LOG_FACTOR, min(_MAX_LOG_FACTOR, value + move))
        self._forget_verification(work.kind)

    def _forget_verification(self, kind: StepKind) -> None:
        """Lower a factor of steps with drafts that none has confirmed for many steps."""
        if kind is StepKind.VERIFY:
            self._num_unverified = 0
        elif kind is StepKind.DECODE:
            self._num_unverified += 1
            excess = self._log_factors[StepKind.VERIFY] - self._log_factors[StepKind.DECODE]
            if self._num_unverified > _UNVERIFIED_STEPS and excess > 0:
                self._log_factors[StepKind.VERIFY] -= _FORGET_RATE * excess

    @property
    def costs(self) -> StepCostModel:
        """The model with the present correction factors."""
        if self._corrected is not None:  # read several times a step
            return self._corrected
        factors: Mapping[StepKind, float] = {kind: math.exp(value) for kind, value in self._log_factors.items()}
        self._corrected = replace(
            self._costs,
            prefill_factor=factors[StepKind.PREFILL],
            decode_factor=factors[StepKind.DECODE],
            verify_factor=factors[StepKind.VERIFY],
            mixed_factor=factors[StepKind.MIXED],
        )
        return self._corrected


def _non_negative_least_squares(rows: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    """Return x >= 0 that minimizes the sum of squares of `row · x - 1`.

    The optimum is the unconstrained solution on some subset of the features. Six features have 63 subsets, so
    all of them are tried.
    """
    scale = [math.sqrt(sum(row[i] ** 2 for row in rows)) or 1.0 for i in range(NUM_FEATURES)]
    scaled = [[value / each for value, each in zip(row, scale, strict=True)] for row in rows]
    present = [i for i in range(NUM_FEATURES) if any(row[i] for row in rows)]
    normal = [[sum(row[i] * row[j] for row in scaled) for j in range(NUM_FEATURES)] for i in range(NUM_FEATURES)]
    right = [sum(row[i] for row in scaled) for i in range(NUM_FEATURES)]
    best, most_explained = (0.0,) * NUM_FEATURES, 0.0
    for count in range(1, len(present) + 1):
        for chosen in combinations(present, count):
            solved = _solve([[normal[i][j] for j in chosen] for i in chosen], [right[i] for i in chosen])
            if solved is None or min(solved) < 0:
                continue
            # At a least squares solution the sum of squares is reduced by right · solved.
            explained = sum(right[i] * value for i, value in zip(chosen, solved, strict=True))
            if explained > most_explained * (1 + 1e-12):
                most_explained = explained
                values = dict(zip(chosen, solved, strict=True))
                best = tuple(values.get(i, 0.0) / scale[i] for i in range(NUM_FEATURES))
    return best


def _solve(matrix: list[list[float]], right: list[float]) -> list[float] | None:
    """Solve a linear system by Gaussian elimination with pivoting. None if the matrix is nearly singular."""
    size = len(right)
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for column in range(size):
        pivot = max(range(column, size), key=lambda i: abs(rows[i][column]))
        if abs(rows[pivot][column]) < _MIN_PIVOT:
            return None
        rows[column], rows[pivot] = rows[pivot], rows[column]
        for below in rows[column + 1 :]:
            factor = below[column] / rows[column][column]
            for i in range(column, size + 1):
                below[i] -= factor * rows[column][i]
    solved = [0.0] * size
    for i in reversed(range(size)):
        solved[i] = (rows[i][size] - sum(rows[i][j] * solved[j] for j in range(i + 1, size))) / rows[i][i]
    return solved
