"""A bounded queue of requests that is fair to tenants.

A lower priority number goes first. Within a priority, tenants are served in turn, so a burst of one tenant
delays only its own requests.

Inside a tenant's turn, the request of the session that has attained the least service goes first (LAS, Nuyens
and Wierman, 2008; for programs of several calls Autellix, Luo et al., 2025), so that short sessions do not
wait behind long ones. It is limited: a request is served as if it were due later by the service that its
session has attained, and by at most half of the time until it is due. Among sessions that have attained
equally much, the request that is due first goes first. A long session thus waits for a bounded time only.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, nsmallest
from itertools import count
from typing import Generic, TypeVar

from baton.core.cluster.placement import PlacementQuery, Rejection
from baton.core.errors import Reason
from baton.scheduler.admission.slo_admission import MIN_RETRY_S

T = TypeVar("T")

MAX_DELAY = 0.5
"""Largest share of the time until a request is due by which the service of its session delays it."""
MIN_LEFT_ENTRIES = 64
"""Entries that have left the queue are dropped once there are so many more of them than others."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QueueEntry(Generic[T]):
    """One queued request.

    handle: what the owner of the queue needs to answer it.
    since_s: when it was added.
    due_s: when its answer must have begun, by its TTFT SLO (`is_due_by_slo`) or by its deadline.
    rank_s: `due_s`, and the delay for the service that its session has attained. Lower ones go first.
    seq: order of arrival, which breaks ties.
    """

    query: PlacementQuery
    handle: T
    since_s: float
    due_s: float
    is_due_by_slo: bool
    rank_s: float
    seq: int

    @property
    def _rank(self) -> tuple[float, int]:
        return self.rank_s, self.seq

    def __lt__(self, other: "QueueEntry[T]") -> bool:
        return self._rank < other._rank


class _PriorityClass(Generic[T]):
    """The requests of one priority: one heap per tenant, lowest rank first.

    Tenants are served by start-time fair queueing (Goyal et al., 1996). A tenant's next service starts in
    virtual time where its last one ended, or now if it was absent. Absence earns no credit.
    """

    def __init__(self) -> None:
        self.heaps: dict[str, list[QueueEntry[T]]] = {}
        self._start: dict[str, float] = {}
        self._end: dict[str, float] = {}
        self._virtual_now = 0.0

    def add(self, entry: QueueEntry[T]) -> None:
        tenant = entry.query.tenant
        if tenant not in self.heaps:
            self.heaps[tenant] = []
            self._start[tenant] = max(self._virtual_now, self._end.get(tenant, 0.0))
        heappush(self.heaps[tenant], entry)

    def first(self) -> QueueEntry[T]:
        return self.heaps[min(self.heaps, key=lambda tenant: (self._start[tenant], self.heaps[tenant][0]))][0]

    def take(self, entry: QueueEntry[T]) -> None:
        """Remove `entry` and charge its tenant for the service."""
        tenant = entry.query.tenant
        self._virtual_now = self._start[tenant]
        self._end[tenant] = self._start[tenant] = self._virtual_now + 1
        self.remove(entry)
        self._end = {each: end for each, end in self._end.items() if end > self._virtual_now}

    def remove(self, entry: QueueEntry[T]) -> None:
        heap = self.heaps[entry.query.tenant]
        if heap[0] is entry:
            heappop(heap)
        else:
            heap.remove(entry)
            heap.sort()  # a sorted list is a heap
        if not heap:
            del self.heaps[entry.query.tenant], self._start[entry.query.tenant]


class FairQueue(Generic[T]):
    """A queue of at most `max_queued_requests` requests. Owned by the scheduler's event loop.

    `slos_set_due`: a first attempt is due by its TTFT SLO if it has one, instead of by its deadline.
    """

    def __init__(self, *, max_queued_requests: int, slos_set_due: bool = True) -> None:
        if max_queued_requests < 1:
            raise ValueError(f"max_queued_requests is {max_queued_requests}; must be at least 1")
        self._max_queued_requests = max_queued_requests
        self._slos_set_due = slos_set_due
        self._by_priority: dict[int, _PriorityClass[T]] = {}
        self._num_by_tenant: dict[str, int] = {}
        self._by_due: list[tuple[float, int, QueueEntry[T]]] = []  # a heap, with entries that have left the queue
        self._queued: set[int] = set()  # the `seq` of entries in the queue
        self._size = 0
        self._seq = count()

    def __len__(self) -> int:
        return self._size

    def add(
        self, query: PlacementQuery, handle: T, now_s: float, *, attained_s: float = 0.0
    ) -> tuple[QueueEntry[T], QueueEntry[T] | None]:
        """Add a request. Returns (its entry, the entry that was displaced for it or None).

        attained_s: service that its session has attained; 0 for a request without a session.

        A full queue displaces the request of the lowest priority that would be served last, of the tenant
        with the most requests. That may be the new one itself.
        """
        within_s, is_due_by_slo = self._due_in_s(query)
        new = QueueEntry(
            query=query,
            handle=handle,
            since_s=now_s,
            due_s=now_s + within_s,
            is_due_by_slo=is_due_by_slo,
            rank_s=now_s + within_s + _delay_s(within_s, attained_s),
            seq=next(self._seq),
        )
        heappush(self._by_due, (new.due_s, new.seq, new))
        self._queued.add(new.seq)
        self._by_priority.setdefault(query.priority, _PriorityClass()).add(new)
        self._count(query.tenant, 1)
        if self._size <= self._max_queued_requests:
            return new, None
        displaced = self._least_entitled()
        self._remove(displaced)
        return new, displaced

    def peek(self) -> QueueEntry[T] | None:
        """Return the next request in fair order without removing it."""
        return self._by_priority[min(self._by_priority)].first() if self._size else None

    def earliest_due(self, limit: int) -> list[QueueEntry[T]]:
        """Return the requests that are due first within the first priorities, regardless of tenants."""
        return nsmallest(
            limit,
            (each for heap in self._heaps() for each in heap),
            key=lambda each: (each.query.priority, each.due_s, each.seq),
        )

    def take(self, entry: QueueEntry[T]) -> None:
        """Remove a request that was placed, and charge its tenant. It need not be the next one."""
        self._by_priority[entry.query.priority].take(entry)
        self._forget(entry)

    def handles_before(self, query: PlacementQuery, now_s: float, *, attained_s: float = 0.0) -> Iterator[T]:
        """Yield the handles of requests that would be served before a new one.

        These are all requests with a lower priority number, and those of the same priority and tenant with a
        lower rank. Tenants take turns, so each other tenant gets as many requests served before it, plus one.
        """
        within_s = self._due_in_s(query)[0]
        rank_s = now_s + within_s + _delay_s(within_s, attained_s)
        for priority, of_priority in self._by_priority.items():
            if priority > query.priority:
                continue
            own = [
                each
                for each in of_priority.heaps.get(query.tenant, ())
                if priority < query.priority or each.rank_s <= rank_s
            ]
            yield from (each.handle for each in own)
            for tenant, heap in of_priority.heaps.items():
                if tenant != query.tenant:
                    num_others = len(heap) if priority < query.priority else len(own) + 1
                    yield from (each.handle for each in nsmallest(num_others, heap))

    def expire(self, now_s: float) -> list[QueueEntry[T]]:
        """Remove and return all requests that are overdue."""
        overdue = []
        while (next_due_s := self.next_due_s) is not None and next_due_s <= now_s:
            overdue.append(self._by_due[0][2])
            self._remove(overdue[-1])
        return overdue

    def remove(self, entry: QueueEntry[T]) -> bool:
        """Remove a request without placing it. Returns False if it is not queued any more."""
        if entry.seq not in self._queued:
            return False
        self._remove(entry)
        return True

    @property
    def next_due_s(self) -> float | None:
        """Time at which the next request becomes overdue, or None if the queue is empty."""
        while self._by_due and self._by_due[0][1] not in self._queued:
            heappop(self._by_due)
        return self._by_due[0][0] if self._by_due else None

    def _due_in_s(self, query: PlacementQuery) -> tuple[float, bool]:
        """Return (seconds until the query is due, True if its SLO sets that time)."""
        if self._slos_set_due and query.attempt == 0 and query.slo.ttft_s is not None:
            left_s = max(0.0, query.slo.ttft_s - query.waited_s)
            if left_s <= query.deadline_s:
                return left_s, True
        return query.deadline_s, False

    def _heaps(self) -> Iterator[list[QueueEntry[T]]]:
        for of_priority in self._by_priority.values():
            yield from of_priority.heaps.values()

    def _least_entitled(self) -> QueueEntry[T]:
        heaps = self._by_priority[max(self._by_priority)].heaps
        return max(heaps[max(heaps, key=lambda tenant: (self._num_by_tenant[tenant], tenant))])

    def _remove(self, entry: QueueEntry[T]) -> None:
        self._by_priority[entry.query.priority].remove(entry)
        self._forget(entry)

    def _forget(self, entry: QueueEntry[T]) -> None:
        self._queued.discard(entry.seq)
        if len(self._by_due) > 2 * len(self._queued) + MIN_LEFT_ENTRIES:
            self._by_due = [each for each in self._by_due if each[1] in self._queued]
            heapify(self._by_due)
        if not self._by_priority[entry.query.priority].heaps:
            del self._by_priority[entry.query.priority]
        self._count(entry.query.tenant, -1)

    def _count(self, tenant: str, change: int) -> None:
        self._size += change
        self._num_by_tenant[tenant] = self._num_by_tenant.get(tenant, 0) + change
        if not self._num_by_tenant[tenant]:
            del self._num_by_tenant[tenant]


def overdue_rejection(entry: QueueEntry[T], now_s: float) -> Rejection:
    """Return the rejection of a queued request whose TTFT SLO or deadline has passed."""
    waited_s, is_slo = now_s - entry.since_s, entry.is_due_by_slo
    return Rejection(
        reason=Reason.TTFT_SLO if is_slo else Reason.DEADLINE,
        message=f"no worker was free within {waited_s:.2g} s; retry after {max(MIN_RETRY_S, waited_s):.2g} s",
        retry_after_s=max(MIN_RETRY_S, waited_s),
        term="waiting_s",
        predicted_s=waited_s,
        limit_s=entry.query.slo.ttft_s if is_slo else entry.query.deadline_s,
    )


def displaced_rejection(queue: FairQueue[T], retry_after_s: float) -> Rejection:
    """Return the rejection of a request that a more entitled one displaced from the full queue."""
    return Rejection(
        reason=Reason.QUEUE_FULL,
        message=f"{len(queue)} requests with precedence wait for a worker; retry after {retry_after_s:.2g} s",
        retry_after_s=retry_after_s,
        term="scheduler_queue",
    )


def _delay_s(within_s: float, attained_s: float) -> float:
    """Return how much later a request is served that is due in `within_s`, see the module's docstring."""
    return min(attained_s, MAX_DELAY * within_s)
