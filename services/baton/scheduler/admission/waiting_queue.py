"""Requests that wait at the scheduler while every worker's queue is long enough: who is next, and who has
waited too long.

Within a priority the earliest due goes first, but tenants take turns, so that one tenant's rush delays its
own requests.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush, nsmallest
from itertools import count
from typing import Generic, TypeVar

from baton.core.cluster.placement import PlacementQuery, Rejection
from baton.core.errors import Reason
from baton.scheduler.admission.slo_admission import MIN_RETRY_S

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Waiting(Generic[T]):
    """One request that waits. `due_s`: when its answer must have begun, by its SLO (`is_promised`) or else
    its deadline. `handle`: whatever its owner needs to answer it."""

    query: PlacementQuery
    handle: T
    since_s: float
    due_s: float
    is_promised: bool
    seq: int

    @property
    def _rank(self) -> tuple[float, int]:
        return self.due_s, self.seq

    def __lt__(self, other: "Waiting[T]") -> bool:
        return self._rank < other._rank


class _Class(Generic[T]):
    """One priority's requests, a heap a tenant, earliest due first. Turns are dealt by start-time fair
    queueing (Goyal et al. 1996): a tenant's turn starts where its last one ended, or now if it was away: who
    was away has saved up nothing."""

    def __init__(self) -> None:
        self.heaps: dict[str, list[Waiting[T]]] = {}
        self._start: dict[str, float] = {}
        self._end: dict[str, float] = {}
        self._now = 0.0

    def add(self, waiting: Waiting[T]) -> None:
        tenant = waiting.query.tenant
        if tenant not in self.heaps:
            self.heaps[tenant] = []
            self._start[tenant] = max(self._now, self._end.get(tenant, 0.0))
        heappush(self.heaps[tenant], waiting)

    def first(self) -> Waiting[T]:
        return self.heaps[min(self.heaps, key=lambda tenant: (self._start[tenant], self.heaps[tenant][0]))][0]

    def take(self, waiting: Waiting[T]) -> None:
        """`waiting`, the first, has its turn."""
        tenant = waiting.query.tenant
        self._now = self._start[tenant]
        self._end[tenant] = self._start[tenant] = self._now + 1
        self.remove(waiting)
        self._end = {each: end for each, end in self._end.items() if end > self._now}

    def remove(self, waiting: Waiting[T]) -> None:
        heap = self.heaps[waiting.query.tenant]
        if heap[0] is waiting:
            heappop(heap)
        else:
            heap.remove(waiting)
            heap.sort()  # a sorted list is a heap
        if not heap:
            del self.heaps[waiting.query.tenant], self._start[waiting.query.tenant]


class WaitingQueue(Generic[T]):
    """Single owner: the scheduler's event loop. Holds at most `max_waiting` requests. `keeps_slos`: one is
    due by its TTFT SLO where it has one, and not only by its deadline."""

    def __init__(self, *, max_waiting: int, keeps_slos: bool = True) -> None:
        if max_waiting < 1:
            raise ValueError("a queue holds at least one request")
        self._max_waiting = max_waiting
        self._keeps_slos = keeps_slos
        self._by_priority: dict[int, _Class[T]] = {}
        self._num_of: dict[str, int] = {}
        self._size = 0
        self._seq = count()

    def __len__(self) -> int:
        return self._size

    def add(self, query: PlacementQuery, handle: T, now_s: float) -> tuple[Waiting[T], Waiting[T] | None]:
        """The place taken, and who had to give way for it: in a full queue the request of the lowest priority
        that is due last, of the tenant that holds most. That may be the new one itself."""
        within_s, is_promised = self._due_in_s(query)
        new = Waiting(
            query=query,
            handle=handle,
            since_s=now_s,
            due_s=now_s + within_s,
            is_promised=is_promised,
            seq=next(self._seq),
        )
        self._by_priority.setdefault(query.priority, _Class()).add(new)
        self._count(query.tenant, 1)
        if self._size <= self._max_waiting:
            return new, None
        victim = self._least_entitled()
        self._remove(victim)
        return new, victim

    def peek(self) -> Waiting[T] | None:
        """Who goes next, left where it is: the lowest priority number, there the tenant whose turn it is, of
        its requests the one due first."""
        return self._by_priority[min(self._by_priority)].first() if self._size else None

    def soonest(self, limit: int) -> list[Waiting[T]]:
        """Who is due first within the first priorities, whosever turn it is."""
        return nsmallest(
            limit, (each for heap in self._heaps() for each in heap), key=lambda each: (each.query.priority, each)
        )

    def take(self, waiting: Waiting[T]) -> None:
        """`waiting` has its turn, though it may not be the next one."""
        self._by_priority[waiting.query.priority].take(waiting)
        self._forget(waiting)

    def before(self, query: PlacementQuery, now_s: float) -> Iterator[T]:
        """Handles of those that would have their turn before a new request: of lower priority numbers all; of
        its tenant those due before it; and of each other tenant as many as turns that has meanwhile."""
        due_s = now_s + self._due_in_s(query)[0]
        for priority, of_priority in self._by_priority.items():
            if priority > query.priority:
                continue
            own = [
                each
                for each in of_priority.heaps.get(query.tenant, ())
                if priority < query.priority or each.due_s <= due_s
            ]
            yield from (each.handle for each in own)
            for tenant, heap in of_priority.heaps.items():
                if tenant != query.tenant:
                    theirs = len(heap) if priority < query.priority else len(own) + 1
                    yield from (each.handle for each in nsmallest(theirs, heap))

    def expire(self, now_s: float) -> list[Waiting[T]]:
        """Take out all that are overdue."""
        overdue = [each for heap in self._heaps() for each in _until(heap, now_s)]
        for each in overdue:
            self._remove(each)
        return overdue

    def remove(self, waiting: Waiting[T]) -> bool:
        """Its client is gone. False if it is not here any more."""
        of_priority = self._by_priority.get(waiting.query.priority)
        if of_priority is None or waiting not in of_priority.heaps.get(waiting.query.tenant, ()):
            return False
        self._remove(waiting)
        return True

    @property
    def next_due_s(self) -> float | None:
        """When `expire` will have something to do."""
        return min((heap[0].due_s for heap in self._heaps()), default=None)

    def _due_in_s(self, query: PlacementQuery) -> tuple[float, bool]:
        """(seconds, whether they are its SLO's)"""
        if self._keeps_slos and query.attempt == 0 and query.slo.ttft_s is not None:
            left_s = max(0.0, query.slo.ttft_s - query.waited_s)
            if left_s <= query.deadline_s:
                return left_s, True
        return query.deadline_s, False

    def _heaps(self) -> Iterator[list[Waiting[T]]]:
        for of_priority in self._by_priority.values():
            yield from of_priority.heaps.values()

    def _least_entitled(self) -> Waiting[T]:
        heaps = self._by_priority[max(self._by_priority)].heaps
        return max(heaps[max(heaps, key=lambda tenant: (self._num_of[tenant], tenant))])

    def _remove(self, waiting: Waiting[T]) -> None:
        self._by_priority[waiting.query.priority].remove(waiting)
        self._forget(waiting)

    def _forget(self, gone: Waiting[T]) -> None:
        if not self._by_priority[gone.query.priority].heaps:
            del self._by_priority[gone.query.priority]
        self._count(gone.query.tenant, -1)

    def _count(self, tenant: str, more: int) -> None:
        self._size += more
        self._num_of[tenant] = self._num_of.get(tenant, 0) + more
        if not self._num_of[tenant]:
            del self._num_of[tenant]


def overdue(waiting: Waiting[T], now_s: float) -> Rejection:
    """The answer to who has waited too long."""
    waited_s, is_slo = now_s - waiting.since_s, waiting.is_promised
    return Rejection(
        reason=Reason.TTFT_SLO if is_slo else Reason.DEADLINE,
        message=f"no worker was free in {waited_s:.2g} s; retry after {max(MIN_RETRY_S, waited_s):.2g} s",
        retry_after_s=max(MIN_RETRY_S, waited_s),
        term="waiting_s",
        predicted_s=waited_s,
        limit_s=waiting.query.slo.ttft_s if is_slo else waiting.query.deadline_s,
    )


def displaced(queue: WaitingQueue[T], retry_after_s: float) -> Rejection:
    """The answer to who had to give way. `retry_after_s`: in which the queue is predicted to have moved
    on."""
    return Rejection(
        reason=Reason.QUEUE_FULL,
        message=f"{len(queue)} requests that come first wait for a worker; retry after {retry_after_s:.2g} s",
        retry_after_s=retry_after_s,
        term="scheduler_queue",
    )


def _until(heap: list[Waiting[T]], now_s: float) -> Iterator[Waiting[T]]:
    """Those due by now, without looking at the others: below one that is not yet due nobody is."""
    at = [0]
    while at:
        i = at.pop()
        if i < len(heap) and heap[i].due_s <= now_s:
            yield heap[i]
            at += [2 * i + 1, 2 * i + 2]
