"""All schedulers of the cluster behind one interface.

Every scheduler is active and can place any request. If one does not answer, or knows no worker, as it may
after its start, the next one is asked.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import TypeVar

from baton.core.cluster.cache_stats import CacheStats
from baton.core.cluster.decision_record import DecisionRecord
from baton.core.cluster.placement import Placement, PlacementQuery, Rejection, StillWaiting
from baton.core.errors import Code, Failure, Reason, Refused, StoreUnavailable, StreamBroken
from baton.core.interfaces import MemberKind, Membership, Network, SchedulerApi
from baton.core.request import RequestActuals
from baton.gateway.cluster.cluster_view import ClusterView
from baton.runtime.logging import get_logger
from baton.runtime.process.awake_timeout import TimeLimit

log = get_logger(__name__)

MAX_UNSENT_ACTUALS = 1024
"""Outcomes that may wait to be reported. More are dropped, because they only serve decision records."""
BATCH_INTERVAL_S = 0.01
"""Time to collect outcomes for one call. One call per outcome would cost a fifth of a short request's
time."""
MAX_OUTCOMES_PER_CALL = 256
"""Maximum number of outcomes in one call."""

MAX_UNLISTED = 4
"""Maximum number of schedulers that are kept although membership does not list them."""
FORGET_HEARTBEATS = 30
"""Heartbeats for which a scheduler that membership does not list must have failed until it is forgotten."""
MIN_POLL_FRACTION = 0.1
"""Fraction of `call_s` that passes at least between two placement calls of one queued request."""

MIN_CALL_SHARE = 0.5
"""Fraction of `call_s` after which a scheduler that has not failed before may count as failed."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerPoolTimes:
    """Timeouts for calls to schedulers.

    heartbeat_s: interval of discovery; half of it is the pause between retries.
    call_s: time after which a call is given up and the next scheduler is asked, stalls of this process not
        counted.
    wait_s: time that new requests wait for any scheduler to answer.
    """

    heartbeat_s: float
    call_s: float
    wait_s: float


class SchedulerPool:
    """Finds the schedulers, calls them, and keeps `view` up to date from one of them.

    The schedulers are those at the given addresses, or those that membership lists if no address is given.
    """

    def __init__(
        self,
        network: Network,
        view: ClusterView,
        *,
        addresses: Sequence[str] = (),
        membership: Membership | None = None,
        times: SchedulerPoolTimes,
        rng: Random,
        awake_clock: Callable[[], float] | None = None,
    ) -> None:
        """Create a pool without connections.

        awake_clock: clock for calls and for the wait of new requests, see `AwakeClock`; None uses the event
            loop's.
        """
        self._network = network
        self._view = view
        self._membership = None if addresses else membership
        self._times = times
        self._rng = rng
        self._call_limit = TimeLimit(times.call_s, awake_clock)
        self._awake_clock = awake_clock
        self._clock = awake_clock or asyncio.get_running_loop().time
        self._apis: dict[str, SchedulerApi] = {}
        self._failed_at_s: dict[str, float] = {}  # address → time of its last failure, until it answers again
        self._failing_since_s: dict[str, float] = {}  # the same for its first failure, by the awake clock
        self._by_decision: dict[str, str] = {}
        self._actuals: asyncio.Queue[tuple[str, RequestActuals]] = asyncio.Queue(MAX_UNSENT_ACTUALS)
        self._scheduler_found = asyncio.Event()
        self._set_addresses(addresses)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses of the known schedulers."""
        return tuple(self._apis)

    async def place(
        self, make_query: Callable[[float, float], PlacementQuery], *, is_first: bool, deadline_s: float
    ) -> Placement | Rejection:
        """Ask schedulers until one decides.

        `make_query` builds the query from the event loop time and the seconds within which an answer must
        come. A first attempt waits up to `wait_s` for a scheduler, stalls of this process not counted, a
        later one until `deadline_s` (event loop time). While a scheduler answers that the request is queued
        there, it is asked again. Raises Refused if no scheduler answers in that time: 504 if it ended with
        the deadline, otherwise 503.
        """
        loop = asyncio.get_running_loop()
        wait_s = self._times.wait_s if is_first else math.inf
        since_s = self._clock()
        while True:
            asked_s = loop.time()
            answer = await self._ask_for_placement(
                lambda api, within_s: api.place(make_query(loop.time(), within_s)),
                min(deadline_s, self._wait_end_s(wait_s, since_s)),
            )
            if answer is not None:
                address, placement = answer
                if isinstance(placement, StillWaiting):
                    since_s = self._clock()
                    await asyncio.sleep(asked_s + MIN_POLL_FRACTION * self._times.call_s - loop.time())
                    continue
                if isinstance(placement, Placement):
                    self._by_decision[placement.decision_id] = address
                return placement
            if loop.time() >= deadline_s:
                message = "the deadline passed before a scheduler answered; allow more time"
                raise Refused(Failure(code=Code.DEADLINE_EXCEEDED, reason=Reason.DEADLINE, message=message))
            left_s = min(deadline_s, self._wait_end_s(wait_s, since_s)) - loop.time()
            if left_s <= 0:
                raise Refused(
                    Failure(
                        code=Code.UNAVAILABLE,
                        reason=Reason.SCHEDULER_LOST,
                        message=f"no scheduler has answered for {self._times.wait_s:g} s; retry later",
                        retry_after_s=max(1.0, self._times.heartbeat_s),
                    )
                )
            self._scheduler_found.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, self._times.heartbeat_s / 2)):
                    await self._scheduler_found.wait()

    def _wait_end_s(self, wait_s: float, since_s: float) -> float:
        """Return when a wait that began at `since_s` of the awake clock ends, as event loop time."""
        return asyncio.get_running_loop().time() + wait_s - (self._clock() - since_s)

    async def _ask_for_placement(
        self, place: Callable[[SchedulerApi, float], Awaitable[Placement | Rejection | StillWaiting]], until_s: float
    ) -> tuple[str, Placement | Rejection | StillWaiting] | None:
        """Return the first answer other than `no_workers`, or that if no scheduler has another one.

        Each scheduler is asked at most once.
        """
        without_workers: dict[str, Rejection] = {}
        while True:
            found = await self._call_first(place, until_s=until_s, skip=without_workers)
            if found is None:
                return next(iter(without_workers.items()), None)
            address, answer = found
            if not isinstance(answer, Rejection) or answer.reason is not Reason.NO_WORKERS:
                return found
            without_workers[address] = answer

    def finished(self, actuals: RequestActuals) -> None:
        """Queue an outcome for the scheduler that made the decision. Dropped if the queue is full."""
        address = self._by_decision.pop(actuals.decision_id, None)
        if address is not None:
            with suppress(asyncio.QueueFull):
                self._actuals.put_nowait((address, actuals))

    async def explain(self, request_id: bytes | None) -> tuple[DecisionRecord, ...]:
        """Return the decision records of a request from any scheduler that has them.

        `request_id` None means the last placed request. Raises Refused (503) if no scheduler answers.
        """
        answers = await self._call_all(lambda api: api.explain(request_id))
        return next((records for records in answers if records), ())

    async def drain(self, worker_id: str, *, node_shutting_down: bool = False) -> bool:
        """Ask all schedulers to drain a worker. Return True if one of them knows the worker.

        Raises Refused (503) if no scheduler answers.
        """
        return any(await self._call_all(lambda api: api.drain(worker_id, node_shutting_down=node_shutting_down)))

    async def clear_tenant(self, tenant_salt: bytes) -> tuple[str, ...]:
        """Ask all schedulers to have a tenant's cached KV erased. Return the ids of the workers that do it.

        Raises Refused (503) if no scheduler answers.
        """
        answers = await self._call_all(lambda api: api.clear_tenant(tenant_salt))
        return tuple(sorted({worker_id for worker_ids in answers for worker_id in worker_ids}))

    async def cache_stats(self) -> CacheStats:
        """Return the cache use of the requests that all schedulers have placed.

        Raises Refused (503) if no scheduler answers.
        """
        return CacheStats.merged(await self._call_all(lambda api: api.cache_stats()))

    async def run(self) -> None:
        """Discover schedulers, watch one of them and report outcomes, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch(), name="scheduler-watch")
            group.create_task(self._report_outcomes(), name="scheduler-finished")
            if self._membership is not None:
                group.create_task(self._discover(self._membership), name="scheduler-find")

    async def _call_first(
        self,
        call: Callable[[SchedulerApi, float], Awaitable[T]],
        *,
        until_s: float,
        skip: Collection[str],
    ) -> tuple[str, T] | None:
        """Return (address, answer) of the first scheduler not in `skip` that answers; None if none does.

        `call` also gets the seconds within which an answer must come. A call that `until_s` (event loop time)
        ends early says nothing about its scheduler. Raises Refused if a scheduler refuses the call for a
        reason other than being unavailable.
        """
        asked, broke = set(skip), False
        while left := [address for address in self._by_preference() if address not in asked]:
            within_s, address = self._time_for(left, until_s, broke=broke), left[0]
            asked.add(address)
            try:
                async with asyncio.timeout_at(until_s), TimeLimit(within_s, self._awake_clock).timeout():
                    answer = await call(self._apis[address], within_s)
            except TimeoutError as error:
                if asyncio.get_running_loop().time() >= until_s:
                    return None
                self._mark_failed(address, error)
            except StreamBroken as error:
                broke = True
                self._mark_failed(address, error)
            except Refused as refused:
                if refused.failure.code is not Code.UNAVAILABLE:
                    raise
                self._mark_failed(address, refused)
            else:
                self._answered(address)
                return address, answer
        return None

    def _time_for(self, left: Sequence[str], until_s: float, *, broke: bool) -> float:
        """Return the seconds within which the first of these schedulers must answer.

        They share the time until `until_s`, because one whose host is gone takes all of its time, and the one
        that works may be the last. One that has not failed gets `MIN_CALL_SHARE` at least.

        broke: the connection to another one broke just now. That one may work, as after a stall of this
            process, so a part of the time is left to ask it again.
        """
        call_s, share_s = self._times.call_s, (until_s - asyncio.get_running_loop().time()) / (len(left) + broke)
        return min(call_s, share_s if left[0] in self._failed_at_s else max(share_s, MIN_CALL_SHARE * call_s))

    async def _call_all(self, call: Callable[[SchedulerApi], Awaitable[T]]) -> list[T]:
        """Return the answers of all schedulers that are available.

        Raises:
            Refused: no scheduler is available, or one refuses the call.
        """
        answers: list[T] = []
        for api, address in [(self._apis[address], address) for address in self._by_preference()]:
            try:
                async with self._call_limit.timeout():
                    answers.append(await call(api))
            except (StreamBroken, TimeoutError) as error:
                self._mark_failed(address, error)
            except Refused as refused:
                if refused.failure.code is not Code.UNAVAILABLE:
                    raise
                self._mark_failed(address, refused)
        if not answers:
            raise Refused(
                Failure(
                    code=Code.UNAVAILABLE,
                    reason=Reason.SCHEDULER_LOST,
                    message="no scheduler answers; retry later",
                    retry_after_s=1.0,
                )
            )
        return answers

    def _by_preference(self) -> list[str]:
        """Return addresses without a failure first, then those whose failure is longest ago."""
        return sorted(self._apis, key=lambda address: self._failed_at_s.get(address, -math.inf))

    def _mark_failed(self, address: str, error: Exception) -> None:
        if address not in self._failed_at_s:
            log.warning("scheduler_call_failed", address=address, problem=str(error) or type(error).__name__)
        self._failed_at_s[address] = asyncio.get_running_loop().time()
        self._failing_since_s.setdefault(address, self._clock())

    def _answered(self, address: str) -> None:
        self._failed_at_s.pop(address, None)
        self._failing_since_s.pop(address, None)

    def _set_addresses(self, addresses: Sequence[str]) -> None:
        new = [address for address in addresses if address not in self._apis]
        self._rng.shuffle(new)  # spreads the gateways over the schedulers
        kept = {address: api for address, api in self._apis.items() if address in addresses}
        gone = self._apis.keys() - kept.keys()
        self._apis = kept | {address: self._network.scheduler(address) for address in new}
        for address in gone:
            self._network.forget_scheduler(address)
        for failures in (self._failed_at_s, self._failing_since_s):
            for address in failures.keys() - self._apis.keys():
                del failures[address]
        if new:
            self._scheduler_found.set()

    async def _discover(self, membership: Membership) -> None:
        while True:
            with suppress(StoreUnavailable):  # keep the last known addresses
                listed = [member.address for member in await membership.members(MemberKind.SCHEDULER)]
                self._set_addresses([*listed, *self._unlisted(listed)])
            await asyncio.sleep(self._times.heartbeat_s)

    def _unlisted(self, listed: Sequence[str]) -> list[str]:
        """Return known schedulers that are not listed, except those that have failed for `FORGET_HEARTBEATS`.

        A store that was emptied, or is too full for announcements, does not list schedulers that still
        answer. A single failure may be a broken connection, or a stall of this process.
        """
        longest_s, now_s = FORGET_HEARTBEATS * self._times.heartbeat_s, self._clock()
        failing_s = {
            address: now_s - self._failing_since_s.get(address, now_s)
            for address in self._apis
            if address not in listed
        }
        kept = [address for address, for_s in failing_s.items() if for_s < longest_s]
        return sorted(kept, key=failing_s.__getitem__)[:MAX_UNLISTED]

    async def _watch(self) -> None:
        """Keep one Watch stream open, from the first scheduler that accepts it."""
        while True:
            for address in self._by_preference():
                await self._watch_one(address)
            await asyncio.sleep(self._times.heartbeat_s / 2)

    async def _watch_one(self, address: str) -> None:
        source = None
        api = self._apis.get(address)
        if api is None:
            return
        try:
            async with self._call_limit.timeout():
                source = await api.watch()
                update = await source.receive()
            while True:
                self._answered(address)
                self._scheduler_found.set()
                self._view.update(update, address)
                update = await source.receive()
        except (StreamBroken, TimeoutError, Refused) as error:
            self._mark_failed(address, error)
            if self._view.scheduler is not None:
                self._view.scheduler_lost()
        finally:
            if source is not None:
                await source.aclose()

    async def _report_outcomes(self) -> None:
        while True:
            batch = [await self._actuals.get()]
            await asyncio.sleep(BATCH_INTERVAL_S)
            while len(batch) < MAX_OUTCOMES_PER_CALL and not self._actuals.empty():
                batch.append(self._actuals.get_nowait())
            for address in dict.fromkeys(address for address, _ in batch):
                api = self._apis.get(address)
                if api is not None:
                    with suppress(StreamBroken, TimeoutError, Refused):
                        async with self._call_limit.timeout():
                            await api.finished(*(actuals for at, actuals in batch if at == address))
