"""The schedulers of the cluster as one. All are active and each is advice, so the next one is asked when one
does not answer."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import TypeVar

from baton.core.cluster.decision_record import DecisionRecord
from baton.core.cluster.placement import Placement, PlacementQuery, Rejection, StillWaiting
from baton.core.errors import Code, Failure, Reason, Refused, StoreUnavailable, StreamBroken
from baton.core.interfaces import MemberKind, Membership, Network, SchedulerApi
from baton.core.request import RequestActuals
from baton.gateway.cluster.cluster_view import ClusterView
from baton.runtime.logging import get_logger

log = get_logger(__name__)

MAX_UNSENT_ACTUALS = 1024
"""Outcomes that wait to be told; more are dropped, since they only serve records."""
GATHER_S = 0.01
"""Outcomes gather for so long before they are told together: a call each would take a fifth of a short
request's time."""
MAX_TOLD = 256
"""In one call."""

LEAST_WAIT_PART = 0.1
"""Of `call_s`: a scheduler that says at once that a request waits is not asked again sooner."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerPoolTimes:
    """`call_s`: how long one call may take before the next scheduler is asked. `wait_s`: how long new
    requests wait for any scheduler."""

    heartbeat_s: float
    call_s: float
    wait_s: float


class SchedulerPool:
    """Finds schedulers (given addresses, or those that membership lists), asks them, and keeps `view` up to
    date from one of them."""

    def __init__(
        self,
        network: Network,
        view: ClusterView,
        *,
        addresses: Sequence[str] = (),
        membership: Membership | None = None,
        times: SchedulerPoolTimes,
        rng: Random,
    ) -> None:
        self._network = network
        self._view = view
        self._membership = None if addresses else membership
        self._times = times
        self._rng = rng
        self._apis: dict[str, SchedulerApi] = {}
        self._suspects: dict[str, float] = {}  # address → when it failed us
        self._by_decision: dict[str, str] = {}
        self._actuals: asyncio.Queue[tuple[str, RequestActuals]] = asyncio.Queue(MAX_UNSENT_ACTUALS)
        self._found = asyncio.Event()
        self._set_addresses(addresses)

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(self._apis)

    async def place(
        self, make_query: Callable[[float, float], PlacementQuery], *, is_first: bool, deadline_s: float
    ) -> Placement | Rejection:
        """Ask until one answers: a new request waits `wait_s` for that, one that is under way until its
        deadline (loop time). While one says that the request waits there, it is asked again. `make_query`: of
        the loop's time, and the seconds in which an answer must come.

        Raises Refused (503) then.
        """
        loop = asyncio.get_running_loop()
        give_up_s = self._give_up_s(is_first, deadline_s)
        while True:
            asked_s = loop.time()
            answer = await self._ask(
                lambda api: api.place(make_query(loop.time(), self._times.call_s)), until_s=give_up_s
            )
            if answer is not None:
                address, placement = answer
                if isinstance(placement, StillWaiting):
                    give_up_s = self._give_up_s(is_first, deadline_s)
                    await asyncio.sleep(asked_s + LEAST_WAIT_PART * self._times.call_s - loop.time())
                    continue
                if isinstance(placement, Placement):
                    self._by_decision[placement.decision_id] = address
                return placement
            left_s = give_up_s - loop.time()
            if left_s <= 0:
                raise Refused(
                    Failure(
                        code=Code.UNAVAILABLE,
                        reason=Reason.SCHEDULER_LOST,
                        message=f"no scheduler has answered for {self._times.wait_s:g} s; retry",
                        retry_after_s=max(1.0, self._times.heartbeat_s),
                    )
                )
            self._found.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, self._times.heartbeat_s / 2)):
                    await self._found.wait()

    def _give_up_s(self, is_first: bool, deadline_s: float) -> float:
        return min(deadline_s, asyncio.get_running_loop().time() + self._times.wait_s) if is_first else deadline_s

    def finished(self, actuals: RequestActuals) -> None:
        """Tell the scheduler that decided; later, and not at all if too many wait already."""
        address = self._by_decision.pop(actuals.decision_id, None)
        if address is not None:
            with suppress(asyncio.QueueFull):
                self._actuals.put_nowait((address, actuals))

    async def explain(self, request_id: bytes | None) -> tuple[DecisionRecord, ...]:
        """Decision records of a request, from whichever scheduler has them. Raises Refused (503) when none
        answers."""
        answers = await self._ask_all(lambda api: api.explain(request_id))
        return next((records for records in answers if records), ())

    async def drain(self, worker_id: str, *, node_shutting_down: bool = False) -> bool:
        """Whether a scheduler has asked the worker to drain. Raises Refused (503) when none answers."""
        return any(await self._ask_all(lambda api: api.drain(worker_id, node_shutting_down=node_shutting_down)))

    async def run(self) -> None:
        """Keep finding schedulers, watching one and telling outcomes, for ever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch(), name="scheduler-watch")
            group.create_task(self._tell(), name="scheduler-finished")
            if self._membership is not None:
                group.create_task(self._find(self._membership), name="scheduler-find")

    async def _ask(
        self, call: Callable[[SchedulerApi], Awaitable[T]], *, until_s: float | None = None
    ) -> tuple[str, T] | None:
        """(address, answer) of the first scheduler that answers; None if none does. Raises Refused where one
        says why not."""
        for address in self._in_order():
            api = self._apis.get(address)
            if api is None:  # it has left while another was asked
                continue
            due_s = asyncio.get_running_loop().time() + self._times.call_s
            try:
                async with asyncio.timeout_at(due_s if until_s is None else min(due_s, until_s)):
                    answer = await call(api)
            except (StreamBroken, TimeoutError) as error:
                self._suspect(address, error)
            except Refused as refused:
                if refused.failure.code is not Code.UNAVAILABLE:
                    raise
                self._suspect(address, refused)
            else:
                self._suspects.pop(address, None)
                return address, answer
        return None

    async def _ask_all(self, call: Callable[[SchedulerApi], Awaitable[T]]) -> list[T]:
        answers: list[T] = []
        for api, address in [(self._apis[address], address) for address in self._in_order()]:
            try:
                async with asyncio.timeout(self._times.call_s):
                    answers.append(await call(api))
            except (StreamBroken, TimeoutError) as error:
                self._suspect(address, error)
        if not answers:
            raise Refused(
                Failure(
                    code=Code.UNAVAILABLE,
                    reason=Reason.SCHEDULER_LOST,
                    message="no scheduler answers; retry",
                    retry_after_s=1.0,
                )
            )
        return answers

    def _in_order(self) -> list[str]:
        """Those that answered last, and then those whose failure is longest ago."""
        return sorted(self._apis, key=lambda address: self._suspects.get(address, float("-inf")))

    def _suspect(self, address: str, error: Exception) -> None:
        if address not in self._suspects:
            log.warning("scheduler_silent", address=address, problem=str(error) or type(error).__name__)
        self._suspects[address] = asyncio.get_running_loop().time()

    def _set_addresses(self, addresses: Sequence[str]) -> None:
        new = [address for address in addresses if address not in self._apis]
        self._rng.shuffle(new)  # so that gateways spread over schedulers
        kept = {address: api for address, api in self._apis.items() if address in addresses}
        self._apis = kept | {address: self._network.scheduler(address) for address in new}
        self._suspects = {address: at_s for address, at_s in self._suspects.items() if address in self._apis}
        if new:
            self._found.set()

    async def _find(self, membership: Membership) -> None:
        while True:
            with suppress(StoreUnavailable):  # what was known last stays
                self._set_addresses([member.address for member in await membership.members(MemberKind.SCHEDULER)])
            await asyncio.sleep(self._times.heartbeat_s)

    async def _watch(self) -> None:
        """One Watch stream at a time, from the scheduler that is asked first."""
        while True:
            for address in self._in_order():
                await self._watch_one(address)
            await asyncio.sleep(self._times.heartbeat_s / 2)

    async def _watch_one(self, address: str) -> None:
        source = None
        api = self._apis.get(address)
        if api is None:
            return
        try:
            async with asyncio.timeout(self._times.call_s):
                source = await api.watch()
                update = await source.receive()
            while True:
                self._suspects.pop(address, None)
                self._found.set()
                self._view.take(update, address)
                update = await source.receive()
        except (StreamBroken, TimeoutError, Refused) as error:
            self._suspect(address, error)
            if self._view.scheduler is not None:
                self._view.lose_scheduler()
        finally:
            if source is not None:
                await source.aclose()

    async def _tell(self) -> None:
        while True:
            told = [await self._actuals.get()]
            await asyncio.sleep(GATHER_S)
            while len(told) < MAX_TOLD and not self._actuals.empty():
                told.append(self._actuals.get_nowait())
            for address in dict.fromkeys(address for address, _ in told):
                api = self._apis.get(address)
                if api is not None:
                    with suppress(StreamBroken, TimeoutError, Refused):
                        async with asyncio.timeout(self._times.call_s):
                            await api.finished(*(actuals for at, actuals in told if at == address))
