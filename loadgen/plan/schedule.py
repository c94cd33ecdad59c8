"""Schedule of a plan's requests. It has no clock: times are seconds from the start of the run.

The plan's times never move, however late or early anything else is: the load is open-loop. Only a later turn
of a session has no fixed time; it is due a think time after the end of the previous turn.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence

from loadgen.plan.plan import PlannedRequest


class Schedule:
    """Due times of the requests that one process sends."""

    def __init__(self, requests: Sequence[PlannedRequest]) -> None:
        self._timed = sorted((request for request in requests if request.at_s is not None), key=_due)
        self._times = [request.at_s or 0.0 for request in self._timed]
        self._num_taken = 0  # of _timed
        self._num_shown = 0
        self._turns: list[tuple[float, int, PlannedRequest]] = []  # released, a heap
        self._released: set[int] = set()  # those in the heap
        self._unshown: deque[PlannedRequest] = deque()
        self._after: dict[int, list[PlannedRequest]] = {}
        for request in requests:
            if request.after is not None:
                self._after.setdefault(request.after, []).append(request)
        self._num_waiting = len(requests) - len(self._timed)

    @property
    def next_s(self) -> float | None:
        """The next known due time, or None."""
        timed = self._times[self._num_taken] if self._num_taken < len(self._times) else None
        turn = self._turns[0][0] if self._turns else None
        return timed if turn is None else turn if timed is None else min(timed, turn)

    @property
    def num_unsent(self) -> int:
        """Number of requests that were neither taken nor dropped."""
        return len(self._timed) - self._num_taken + len(self._turns) + self._num_waiting

    def take_due(self, now_s: float) -> list[tuple[float, PlannedRequest]]:
        """Remove and return the requests due by now as (due time, request), in that order."""
        end = bisect_right(self._times, now_s, lo=self._num_taken)
        due = list(zip(self._times[self._num_taken : end], self._timed[self._num_taken : end], strict=True))
        self._num_taken = end
        if self._turns and self._turns[0][0] <= now_s:
            while self._turns and self._turns[0][0] <= now_s:
                at_s, _, request = heapq.heappop(self._turns)
                self._released.discard(request.index)
                due.append((at_s, request))
            due.sort(key=lambda entry: entry[0])
        return due

    def has_later_turn(self, index: int) -> bool:
        """True if another request follows request `index`."""
        return index in self._after

    def ended(self, index: int, at_s: float, *, is_complete: bool) -> list[tuple[float, PlannedRequest]]:
        """Process the end of request `index` and return the (due time, request) of dropped later turns.

        After a complete response the next turn is scheduled. Otherwise it and all turns after it are dropped;
        their times are those at which they would have been due.
        """
        dropped: list[tuple[float, PlannedRequest]] = []
        ends = [(index, at_s)]
        while ends:
            index, at_s = ends.pop()
            for request in self._after.pop(index, ()):
                due_s = at_s + request.think_s
                self._num_waiting -= 1
                if is_complete:
                    heapq.heappush(self._turns, (due_s, request.index, request))
                    self._released.add(request.index)
                    self._unshown.append(request)
                else:
                    dropped.append((due_s, request))
                    ends.append((request.index, due_s))
        return dropped

    def upcoming(self, until_s: float) -> PlannedRequest | None:
        """Return a request that is due by then and was not returned before, so that it can be prepared. None
        if there is none."""
        while self._unshown:
            request = self._unshown.popleft()
            if request.index in self._released:
                return request
        if self._num_shown < self._num_taken:
            self._num_shown = self._num_taken
        if self._num_shown < len(self._timed) and self._times[self._num_shown] <= until_s:
            self._num_shown += 1
            return self._timed[self._num_shown - 1]
        return None

    def num_due(self, until_s: float) -> int:
        """Return how many requests are known to be due by then."""
        count = bisect_right(self._times, until_s, lo=self._num_taken) - self._num_taken
        look = [0]  # positions in the heap; children are never earlier than their parent
        while look:
            place = look.pop()
            if place < len(self._turns) and self._turns[place][0] <= until_s:
                count += 1
                look += (2 * place + 1, 2 * place + 2)
        return count


def share(requests: Sequence[PlannedRequest], part: int, parts: int) -> list[PlannedRequest]:
    """Return the requests that process `part` of `parts` sends.

    Sessions stay together; everything else is distributed in turn.
    """
    if parts == 1:
        return list(requests)
    owner: dict[int, int] = {}
    sessions: dict[str, int] = {}
    num_groups = 0
    for request in requests:
        known = (
            owner.get(request.after)
            if request.after is not None
            else sessions.get(request.session)
            if request.session
            else None
        )
        if known is None:
            known = num_groups % parts
            num_groups += 1
        owner[request.index] = known
        if request.session:
            sessions.setdefault(request.session, known)
    return [request for request in requests if owner[request.index] == part]


def peak_rates(requests: Sequence[PlannedRequest], window_s: float = 5.0) -> tuple[float, float]:
    """Return (requests, output tokens) per second in the busiest window of the plan.

    Later turns are spread evenly over the requests with a fixed time.
    """
    timed = sorted((request for request in requests if request.at_s is not None), key=_due)
    if not timed:
        return 0.0, 0.0
    window_s = max(min(window_s, _due(timed[-1]) - _due(timed[0])), 1.0)
    more = len(requests) / len(timed)
    most_requests = most_tokens = 0
    first = tokens = 0
    for last, request in enumerate(timed):
        tokens += request.output_tokens
        while _due(request) - _due(timed[first]) >= window_s:
            tokens -= timed[first].output_tokens
            first += 1
        most_requests, most_tokens = max(most_requests, last - first + 1), max(most_tokens, tokens)
    return more * most_requests / window_s, more * most_tokens / window_s


def _due(request: PlannedRequest) -> float:
    return request.at_s or 0.0
