"""Validates plans, both when they are read and before they are written."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

from loadgen.loadgen_errors import BadPlan
from loadgen.plan.plan import AnswerOf, Exact, Generated, Plan, PlannedRequest, Segment, Text, Vocabulary
from loadgen.plan.prompt_tokens import max_segment_id
from loadgen.slo_target import SloTarget

MAX_TOKEN_ID = 2**31 - 1
MAX_VOCABULARY = 2**24
ROLES = ("user", "assistant", "system")


class PlanChecker:
    """Validates a plan's requests one after the other. Errors do not name the position."""

    def __init__(self, vocabulary: Vocabulary, slos: Mapping[str, SloTarget]) -> None:
        check_vocabulary(vocabulary)
        if not slos:
            raise BadPlan("`slos` has no class; it needs at least `default`")
        self._slos = slos
        self._max_segment_id = max_segment_id(vocabulary)
        self._next_index = 0
        self._latest_at_s = 0.0
        # For each request of a session: the session, the turn, and all requests that have a response before
        # the next turn is sent.
        self._sessions: dict[int, tuple[str, int, frozenset[int]]] = {}

    def add(self, request: PlannedRequest) -> None:
        """Check the next request. Raises BadPlan."""
        if request.index != self._next_index:
            raise BadPlan(
                f"`index` is {request.index}; it must be {self._next_index}, because requests are numbered from 0 "
                "in file order"
            )
        earlier = self._check_time(request)
        self._check_prompt(request.segments, earlier)
        if request.output_tokens < 1:
            raise BadPlan(f"`output_tokens` is {request.output_tokens}; it must be at least 1")
        cancel = request.cancel_after_tokens
        if cancel is not None and not 1 <= cancel < request.output_tokens:
            raise BadPlan(
                f"`cancel_after_tokens` is {cancel}; it must be from 1 to one less than `output_tokens` "
                f"({request.output_tokens})"
            )
        if request.slo_class not in self._slos:
            raise BadPlan(f"`slo_class` is `{request.slo_class}`; the header's `slos` has only {_names(self._slos)}")
        if request.session:
            self._sessions[request.index] = (request.session, request.turn, earlier | {request.index})
        self._next_index += 1

    def _check_time(self, request: PlannedRequest) -> frozenset[int]:
        """Check the request's time and return the earlier turns whose responses its prompt may contain."""
        if (request.at_s is None) == (request.after is None):
            raise BadPlan("a request needs either `at_s` (a first turn) or `after` (a later turn)")
        if request.turn < 0:
            raise BadPlan(f"`turn` is {request.turn}; turns are numbered from 0")
        if request.at_s is not None:
            if not (math.isfinite(request.at_s) and request.at_s >= 0):
                raise BadPlan(f"`at_s` is {request.at_s}; it must be 0 or more seconds from the start of the run")
            if request.at_s < self._latest_at_s:
                raise BadPlan(
                    f"`at_s` is {request.at_s}, before {self._latest_at_s} in an earlier line; sort the requests "
                    "by time"
                )
            if request.think_s:
                raise BadPlan("`think_s` is only allowed with `after`, but this request has `at_s`")
            self._latest_at_s = request.at_s
            return frozenset()
        assert request.after is not None
        if not (math.isfinite(request.think_s) and request.think_s >= 0):
            raise BadPlan(f"`think_s` is {request.think_s}; it must be 0 or more seconds")
        if not 0 <= request.after < request.index:
            raise BadPlan(f"`after` is {request.after}; it must be an earlier request")
        session, turn, earlier = self._sessions.get(request.after, ("", -1, frozenset()))
        if not request.session or session != request.session:
            raise BadPlan(f"`after` is {request.after}, which is not in this request's session (`{request.session}`)")
        if request.turn <= turn:
            raise BadPlan(
                f"`turn` is {request.turn}; it must be above {turn}, the turn of request {request.after} (`after`)"
            )
        return earlier

    def _check_prompt(self, segments: tuple[Segment, ...], earlier: frozenset[int]) -> None:
        if not segments:
            raise BadPlan("`segments` is empty; a prompt needs at least one")
        has_text = False
        for position, segment in enumerate(segments):
            match segment:
                case Generated(segment_id=segment_id, num_tokens=num_tokens):
                    if num_tokens < 1:
                        raise BadPlan(f"segment {position} has {num_tokens} tokens; it needs at least 1")
                    if not 0 <= segment_id <= self._max_segment_id:
                        raise BadPlan(
                            f"segment {position}: `id` is {segment_id}; with this vocabulary it must be from 0 to "
                            f"{self._max_segment_id}"
                        )
                case Exact(token_ids=token_ids):
                    if not token_ids:
                        raise BadPlan(f"segment {position} has no tokens; it needs at least 1")
                    if min(token_ids) < 0 or max(token_ids) > MAX_TOKEN_ID:
                        raise BadPlan(f"segment {position}: token ids must be from 0 to {MAX_TOKEN_ID}")
                case AnswerOf(index=index):
                    if index not in earlier:
                        raise BadPlan(
                            f"segment {position}: `answer_of` is {index}, which is not an earlier turn of this session"
                        )
                case Text(text=text, role=role):
                    if role not in ROLES:
                        raise BadPlan(f"segment {position}: the role is `{role}`; it must be one of {', '.join(ROLES)}")
                    if not text:
                        raise BadPlan(f"segment {position}: the text must not be empty")
                    has_text = True
        if has_text and not all(isinstance(segment, Text) for segment in segments):
            raise BadPlan("a text cannot be combined with other segments, because only the server knows its tokens")


def check_plan(plan: Plan) -> None:
    """Validate a plan. Raises BadPlan with the position of the request."""
    if not plan.requests:
        raise BadPlan("the plan has no requests")
    checker = PlanChecker(plan.vocabulary, plan.slos)
    for position, request in enumerate(plan.requests):
        try:
            checker.add(request)
        except BadPlan as error:
            raise BadPlan(f"request {position}: {error}") from None


def check_vocabulary(vocabulary: Vocabulary) -> None:
    """Validate a vocabulary. Raises BadPlan."""
    if not 0 <= vocabulary.low < vocabulary.high <= MAX_TOKEN_ID + 1:
        raise BadPlan(
            f"the vocabulary is {vocabulary.low} to {vocabulary.high}; `low` must be 0 or more and below `high`"
        )
    if vocabulary.high - vocabulary.low > MAX_VOCABULARY:
        raise BadPlan(
            f"the vocabulary is {vocabulary.low} to {vocabulary.high}; it must have at most {MAX_VOCABULARY} ids"
        )
    excluded = vocabulary.excluded
    is_inside = all(vocabulary.low <= token_id < vocabulary.high for token_id in excluded)
    if not is_inside or any(a >= b for a, b in itertools.pairwise(excluded)):
        raise BadPlan(
            f"the vocabulary's `excluded` must be ascending ids from {vocabulary.low} to {vocabulary.high - 1}"
        )
    if vocabulary.size < 2:
        raise BadPlan(f"the vocabulary has {vocabulary.size} token ids; it needs at least two")


def _names(slos: Mapping[str, SloTarget]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(slos))
