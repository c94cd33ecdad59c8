"""What a plan must be for a run of it to mean something; checked when a plan is read and before it is
written."""

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
    """Takes a plan's requests in order and raises BadPlan, without saying where, at the first that does not
    fit those before it."""

    def __init__(self, vocabulary: Vocabulary, slos: Mapping[str, SloTarget]) -> None:
        check_vocabulary(vocabulary)
        if not slos:
            raise BadPlan("`slos` names no class: there is at least `default`")
        self._slos = slos
        self._max_segment_id = max_segment_id(vocabulary)
        self._next_index = 0
        self._latest_at_s = 0.0
        # Of each request of a session: the session, the turn, and the requests that have surely been answered
        # when it is.
        self._sessions: dict[int, tuple[str, int, frozenset[int]]] = {}

    def add(self, request: PlannedRequest) -> None:
        if request.index != self._next_index:
            raise BadPlan(
                f"`index` is {request.index}, but this is request {self._next_index}: they count from 0 in the order of lines"
            )
        earlier = self._check_time(request)
        self._check_prompt(request.segments, earlier)
        if request.output_tokens < 1:
            raise BadPlan(f"`output_tokens` is {request.output_tokens}: an answer has at least one token")
        cancel = request.cancel_after_tokens
        if cancel is not None and not 1 <= cancel < request.output_tokens:
            raise BadPlan(
                f"`cancel_after_tokens` is {cancel}: from 1 to one less than `output_tokens` ({request.output_tokens})"
            )
        if request.slo_class not in self._slos:
            raise BadPlan(f"`slo_class` is `{request.slo_class}`, but the header's `slos` have {_names(self._slos)}")
        if request.session:
            self._sessions[request.index] = (request.session, request.turn, earlier | {request.index})
        self._next_index += 1

    def _check_time(self, request: PlannedRequest) -> frozenset[int]:
        """The earlier turns whose answers it may hold."""
        if (request.at_s is None) == (request.after is None):
            raise BadPlan("give either `at_s` (a first turn) or `after` (a later one)")
        if request.turn < 0:
            raise BadPlan(f"`turn` is {request.turn}: turns count from 0")
        if request.at_s is not None:
            if not (math.isfinite(request.at_s) and request.at_s >= 0):
                raise BadPlan(f"`at_s` is {request.at_s}: seconds from the start of the run, 0 or more")
            if request.at_s < self._latest_at_s:
                raise BadPlan(
                    f"`at_s` is {request.at_s}, before the {self._latest_at_s} of an earlier line: sort by time"
                )
            if request.think_s:
                raise BadPlan("`think_s` is for later turns, which have `after`; this one has `at_s`")
            self._latest_at_s = request.at_s
            return frozenset()
        assert request.after is not None
        if not (math.isfinite(request.think_s) and request.think_s >= 0):
            raise BadPlan(f"`think_s` is {request.think_s}: seconds, 0 or more")
        if not 0 <= request.after < request.index:
            raise BadPlan(f"`after` is {request.after}: not an earlier request")
        session, turn, earlier = self._sessions.get(request.after, ("", -1, frozenset()))
        if not request.session or session != request.session:
            raise BadPlan(f"`after` is {request.after}, which is not in this request's session (`{request.session}`)")
        if request.turn <= turn:
            raise BadPlan(
                f"`turn` is {request.turn}, but that of request {request.after}, which it comes after, is {turn}"
            )
        return earlier

    def _check_prompt(self, segments: tuple[Segment, ...], earlier: frozenset[int]) -> None:
        if not segments:
            raise BadPlan("the prompt is empty: `segments` has none")
        has_text = False
        for position, segment in enumerate(segments):
            match segment:
                case Generated(segment_id=segment_id, num_tokens=num_tokens):
                    if num_tokens < 1:
                        raise BadPlan(f"segment {position} has {num_tokens} tokens: at least one")
                    if not 0 <= segment_id <= self._max_segment_id:
                        raise BadPlan(
                            f"segment {position}: `id` is {segment_id}; this vocabulary has room for 0 to {self._max_segment_id}"
                        )
                case Exact(token_ids=token_ids):
                    if not token_ids:
                        raise BadPlan(f"segment {position} has no tokens: at least one")
                    if min(token_ids) < 0 or max(token_ids) > MAX_TOKEN_ID:
                        raise BadPlan(f"segment {position}: token ids are 0 to {MAX_TOKEN_ID}")
                case AnswerOf(index=index):
                    if index not in earlier:
                        raise BadPlan(
                            f"segment {position}: `answer_of` is {index}, which is no earlier turn of this session"
                        )
                case Text(text=text, role=role):
                    if role not in ROLES:
                        raise BadPlan(f"segment {position}: the role `{role}` is none of {', '.join(ROLES)}")
                    if not text:
                        raise BadPlan(f"segment {position}: the text is empty")
                    has_text = True
        if has_text and not all(isinstance(segment, Text) for segment in segments):
            raise BadPlan("text is mixed with other segments: where its tokens would end, only the server knows")


def check_plan(plan: Plan) -> None:
    """Raises BadPlan, naming the request."""
    if not plan.requests:
        raise BadPlan("the plan has no requests")
    checker = PlanChecker(plan.vocabulary, plan.slos)
    for position, request in enumerate(plan.requests):
        try:
            checker.add(request)
        except BadPlan as error:
            raise BadPlan(f"request {position}: {error}") from None


def check_vocabulary(vocabulary: Vocabulary) -> None:
    """Raises BadPlan."""
    if not 0 <= vocabulary.low < vocabulary.high <= MAX_TOKEN_ID + 1:
        raise BadPlan(f"the vocabulary is {vocabulary.low} to {vocabulary.high}: token ids from 0, the end excluded")
    if vocabulary.high - vocabulary.low > MAX_VOCABULARY:
        raise BadPlan(f"the vocabulary is {vocabulary.low} to {vocabulary.high}: at most {MAX_VOCABULARY} ids")
    excluded = vocabulary.excluded
    is_inside = all(vocabulary.low <= token_id < vocabulary.high for token_id in excluded)
    if not is_inside or any(a >= b for a, b in itertools.pairwise(excluded)):
        raise BadPlan(
            f"the vocabulary's `excluded` must be ascending ids from {vocabulary.low} to {vocabulary.high - 1}"
        )
    if vocabulary.size < 2:
        raise BadPlan(f"the vocabulary has {vocabulary.size} token ids: at least two")


def _names(slos: Mapping[str, SloTarget]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(slos))
