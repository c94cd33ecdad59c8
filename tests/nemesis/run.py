"""Runs the nemesis: an undisturbed run of all cases, then clients and faults, then the checks."""

import asyncio
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import regex

from baton.runtime.process.process import Background
from tests.cluster import ProcessCluster
from tests.emulated_answer import emulated_answer
from tests.malformed_connections import internal_errors
from tests.nemesis import goodput, resources
from tests.nemesis.cases import GRPC, Case, draw_cases, with_stop_strings
from tests.nemesis.clients import Clients
from tests.nemesis.faults import FAULTS
from tests.nemesis.goodput import Goodput, Observed
from tests.nemesis.history import Answer, End, Interval, Problem, Surroundings, check_history, count_ends
from tests.nemesis.keeper import Keeper, exceptions_of
from tests.nemesis.links import LoopbackLinks, NamespaceLinks, namespaces_unavailable_reason
from tests.nemesis.memory_growth import MemorySamples
from tests.nemesis.plan import (
    APART_SHARE,
    DISK_KINDS,
    GATEWAYS,
    KINDS,
    LONGEST_S,
    MEASURED,
    REDIS,
    SCHEDULERS,
    SERVICES,
    WORKERS,
    Fault,
    make_plan,
)
from tests.nemesis.readiness import until_settled
from tests.nemesis.stalls import StallMonitor
from tests.nemesis.world import HostTools, World, host_unavailable_reason
from tests.times import TEST_TIMES

VOCAB_SIZE = 4096
LONG_S = 600.0
"""Duration of the faults from which on memory and goodput are asserted."""
ALL_ROLES_S = 1200.0
"""Duration of the faults from which on goodput must be measured with a worker of each role down."""
SHORT_S = 60.0
"""Duration of the faults up to which a run is small."""
BACK_S = 300.0
"""Time for a process to start, and for workers and blocks to come back. Generous, for slow machines."""
CONTROL_IN_FLIGHT = 6
TIER_BYTES = 24 * 2**20
"""Size of each slower tier of a worker."""
SHORT_SHARE = 0.1
"""Share of the requests whose deadline is so short that many of them end at it."""
SETTINGS: dict[str, Any] = {
    **TEST_TIMES,
    "heartbeat_s": 0.5,
    "detection_s": 2.0,
    "lease_s": 4.0,
    "session_grace_s": 4.0,
    "scheduler_wait_s": 30.0,
    "pull_wait_s": 10.0,
    "step_limit_s": 120.0,  # a paused worker must go on, so that its late messages and reads are tested
    "receive_deadline_s": 30.0,
    "device": "emulated",
    "kv_memory": 48 * 2**20,
    "max_model_len": 2048,
    "max_num_batched_tokens": 256,
    "max_record_bytes": 4 * 2**20,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """One run.

    seconds: duration of the faults.
    network: `loopback` or `namespaces`.
    transfer: transport of KV, as `--transfer` of a worker.
    calm_s: time under load before the first fault.
    longest_s: longest duration of a fault.
    apart_share: share of the faults that are open alone.
    deadline_s, short_share: deadline of a request, and the share of requests with a much shorter one.
    step_ms: duration of an emulated step.
    judges_goodput: goodput is asserted. It says nothing while other programs use the machine now and then.
    """

    seed: int
    seconds: float
    network: str = "loopback"
    transfer: str = "nixl"
    kinds: tuple[str, ...] = tuple(KINDS)
    longest_s: float = LONGEST_S
    apart_share: float = APART_SHARE
    calm_s: float = 30.0
    num_clients: int = 12
    num_cases: int = 120
    max_tokens: int = 100
    deadline_s: float = 60.0
    short_share: float = SHORT_SHARE
    step_ms: int = 10
    judges_goodput: bool = True

    @property
    def is_long(self) -> bool:
        """True if the growth of memory is asserted."""
        return self.seconds >= LONG_S

    @property
    def needs_goodput(self) -> bool:
        """True if goodput with one worker down is asserted, for the roles for which it is measured."""
        return self.judges_goodput and self.is_long and MEASURED in self.kinds

    @property
    def needs_all_roles(self) -> bool:
        """True if goodput must be measured with a worker of each role down."""
        return self.needs_goodput and self.seconds >= ALL_ROLES_S

    @property
    def tiers(self) -> dict[str, int]:
        """The slower tiers of all workers, which follow from the seed: settings of their sizes in bytes.

        Half of the seeds have a host tier, and half a disk tier. A run of `DISK_KINDS` only has a disk tier.
        """
        rng = Random(f"{self.seed} tiers")
        has_host, has_disk = rng.random() < 0.5, rng.random() < 0.5
        has_disk = has_disk or DISK_KINDS.issuperset(self.kinds)
        sizes = {"host_kv_memory": has_host, "disk_kv_size": has_disk}
        return {name: TIER_BYTES for name, is_used in sizes.items() if is_used}

    def plan(self) -> tuple[Fault, ...]:
        """Return the faults of the run. Without a disk tier none of them is of `DISK_KINDS`."""
        has_disk = "disk_kv_size" in self.tiers
        kinds = [kind for kind in self.kinds if has_disk or kind not in DISK_KINDS]
        return make_plan(self.seed, self.seconds, kinds=kinds, longest_s=self.longest_s, apart_share=self.apart_share)

    @staticmethod
    def sized(seconds: float, **options: Any) -> "Options":
        """Return options for this duration. Short runs have short faults, and fewer clients and cases."""
        if seconds <= SHORT_S:
            small = {
                "longest_s": 4.0,
                "apart_share": 0.0,
                "calm_s": 2.0,
                "num_clients": 5,
                "num_cases": 16,
                "max_tokens": 40,
                "step_ms": 20,
            }
            options = {**small, **options}
        return Options(seconds=seconds, **options)


@dataclass(slots=True, kw_only=True)
class Result:
    """Outcome of a run. problems: empty if the run is good."""

    problems: list[str] = field(default_factory=list)
    ends: Mapping[str, int] = field(default_factory=dict)
    num_faults: int = 0
    goodput: Goodput | None = None


def unavailable_reason(network: str) -> str:
    """Return why no run on this network is possible on this machine, or an empty string."""
    return host_unavailable_reason() or (namespaces_unavailable_reason() if network == "namespaces" else "")


async def run_nemesis(options: Options, directory: Path, say: Callable[[str], None]) -> Result:
    """Run the nemesis with all files in `directory`, which must have a short path. `say` gets progress."""
    result = Result()
    tools = HostTools(directory)
    try:
        network = await _new_network(options, tools)
        tiers: dict[str, Any] = dict(options.tiers)
        if "disk_kv_size" in tiers:
            tiers["disk_kv"] = str(directory / "kv")
        cluster = ProcessCluster(
            directory,
            {
                **SETTINGS,
                **tiers,
                "transfer": options.transfer,
                "emulated_costs": f"step={options.step_ms}ms,prefill_token=50us",
            },
            network=network,
        )
        try:
            cluster.start_limit_s = BACK_S
            say(
                f"starting {len(SERVICES)} services and Redis, network {options.network}, {options.transfer}, "
                f"tiers {options.tiers}"
            )
            await cluster.start(prefill=2, decode=2, hybrid=1, schedulers=len(SCHEDULERS), gateways=len(GATEWAYS))
            await until_settled(cluster, WORKERS, limit_s=BACK_S)
            say("all workers are ready and linked; sending each case without faults")
            await _Run(options, World(cluster, network, tools), result, say).run(options.plan())
        finally:
            await cluster.stop()
    except (Exception, ExceptionGroup) as error:
        result.problems += [f"error: {each!r}" for each in exceptions_of(error)]
        say("".join(traceback.format_exception(error)))
    finally:
        tools.close()
    return result


async def _new_network(options: Options, tools: HostTools) -> LoopbackLinks | NamespaceLinks:
    if options.network == "namespaces":
        return NamespaceLinks((*SERVICES, REDIS), tools.environs)
    loopback = LoopbackLinks(tools.environs)
    try:
        await loopback.open((*WORKERS, *SCHEDULERS))
    except BaseException:
        await loopback.aclose()
        raise
    return loopback


class _Run:
    """The part of a run during which the cluster is up."""

    def __init__(self, options: Options, world: World, result: Result, say: Callable[[str], None]) -> None:
        self._options = options
        self._world = world
        self._say = say
        self._result = result
        self._observed: list[Observed] = []
        self._memory = MemorySamples(lambda: resources.memory_of(world), world.now_s)
        self._stalls = StallMonitor(world.now_s)
        self._keeper = Keeper(world, self._problem, say)

    async def run(self, plan: Sequence[Fault]) -> None:
        world = self._world
        world.note_addresses()
        cases, expected = await self._undisturbed()
        if self._result.problems:
            return  # nothing can be compared
        await world.cluster.check_clean(BACK_S)
        before, redis_before = await resources.usage_of(world), await resources.redis_usage(world)
        clients = Clients(world.cluster.gateways, world.now_s)
        async with Background(self._keeper.run(), self._memory.run(), self._stalls.run()):
            calm = await self._disturb(plan, clients, cases)
            surroundings = Surroundings(
                down=world.times.down,
                paused=world.times.paused,
                stalls=self._stalls.stalls,
                secrets=frozenset(world.addresses),
            )
            self._take(check_history(clients.records, expected, surroundings))
            self._say("all requests have ended; waiting until all resources are back")
            self._result.ends = count_ends(clients.records)
            self._result.num_faults = len(self._observed)
            self._result.goodput = goodput.measure(clients.records, calm, self._observed)
            await self._check_end(before, redis_before)

    async def _disturb(self, plan: Sequence[Fault], clients: Clients, cases: Sequence[Case]) -> Interval:
        """Inject the faults while clients send cases. Return the time before the first fault."""
        options, has_ended = self._options, asyncio.Event()
        async with asyncio.TaskGroup() as load:
            for number in range(options.num_clients):
                rng = Random(f"{options.seed} {number}")
                load.create_task(
                    clients.run(
                        cases, rng, deadline_s=options.deadline_s, short_share=options.short_share, until=has_ended
                    )
                )
            calm = await self._calm()
            await self._inject(plan)
            has_ended.set()
            self._say("faults are over; waiting for the last requests")
        return calm

    async def _undisturbed(self) -> tuple[list[Case], dict[str, Answer]]:
        """Return the cases and their answers from the cluster without faults, sent whole and streamed."""
        options = self._options
        drawn = draw_cases(
            options.seed, options.num_cases, vocab_size=VOCAB_SIZE, max_prompt=400, max_tokens=options.max_tokens
        )
        expected = await self._answers(drawn)
        stopped = with_stop_strings(options.seed, drawn, expected)
        expected |= await self._answers(stopped)
        known = {case.name: right for case in drawn if (right := _known_tokens(case)) is not None}
        for name, right in known.items():
            if expected[name].choices[0].token_ids != right:
                self._problem("control", f"{name} is not the answer of the emulated model")
        for case in drawn:
            for choice in expected[case.name].choices.values() if case.pattern else ():
                if not regex.fullmatch(case.pattern, choice.text, partial=choice.finishes == ["length"]):
                    self._problem("control", f"{case.name}: {choice.text!r} does not match {case.pattern}")
        self._say(
            f"{len(drawn)} cases and {len(stopped)} with stop strings answered; {len(known)} compared with the model"
        )
        return [*drawn, *stopped], expected

    async def _answers(self, cases: Sequence[Case]) -> dict[str, Answer]:
        """Send each case once as a stream and, over HTTP, once whole. Both must agree."""
        clients, slots = Clients(self._world.cluster.gateways, self._world.now_s), asyncio.Semaphore(CONTROL_IN_FLIGHT)

        async def send(case: Case, number: int, *, is_stream: bool) -> Answer:
            async with slots:
                record = await clients.send(case, GATEWAYS[number % 2], is_stream=is_stream, deadline_s=BACK_S)
            if record.ends != [End.COMPLETE]:
                self._problem("control", f"{record} ended with {record.ends} {record.message}")
            return record.answer

        streamed = await asyncio.gather(*(send(case, i, is_stream=True) for i, case in enumerate(cases)))
        answers = {case.name: answer for case, answer in zip(cases, streamed, strict=True)}
        over_http = [case for case in cases if case.api != GRPC]
        await asyncio.gather(*(send(case, i + 1, is_stream=False) for i, case in enumerate(over_http)))
        self._take(check_history(clients.records, answers, Surroundings()))
        return answers

    async def _calm(self) -> Interval:
        """Let the clients run without faults, and return the second half of that time."""
        self._say(f"{self._options.num_clients} clients run; first fault in {self._options.calm_s:g} s")
        await asyncio.sleep(self._options.calm_s / 2)
        begin_s = self._world.now_s()
        await asyncio.sleep(self._options.calm_s / 2)
        return Interval(name="calm", begin_s=begin_s, end_s=self._world.now_s())

    async def _inject(self, plan: Sequence[Fault]) -> None:
        """Inject the faults at their times, later if a target is still busy with an earlier one."""
        start_s = self._world.now_s()

        async def inject(fault: Fault) -> None:
            try:
                async with self._keeper.held(*fault.targets):
                    begin_s = self._world.now_s()
                    self._say(f"{begin_s - start_s:7.1f} s  {fault}")
                    async with FAULTS[fault.kind](self._world, fault):
                        await asyncio.sleep(fault.duration_s)
                    self._observed.append(Observed(fault=fault, begin_s=begin_s, end_s=self._world.now_s()))
            except Exception as error:  # the run goes on, and fails at its end
                self._problem("fault", f"{fault}: {error!r}")

        async with asyncio.TaskGroup() as group:
            for fault in plan:
                await asyncio.sleep(max(0.0, start_s + fault.begin_s - self._world.now_s()))
                group.create_task(inject(fault))
            await asyncio.sleep(max(0.0, start_s + self._options.seconds - self._world.now_s()))

    async def _check_end(self, before: Mapping[str, resources.Usage], redis_before: resources.RedisUsage) -> None:
        world, options = self._world, self._options
        try:
            for name in GATEWAYS:
                await world.cluster.wait_ready(world.cluster.gateways[name].url)
            await world.cluster.until_workers(*WORKERS, limit_s=BACK_S)
            await world.cluster.check_clean(BACK_S)
            left = await resources.leftovers(world, before, redis_before, dead_workers_are_gone=options.is_long)
        except AssertionError as error:
            left = [str(error)]
        for text in left:
            self._problem("left", text)
        self._check_measured()
        for text in world.network.strangers():
            self._problem("fault", text)
        for name in SERVICES:
            for line in internal_errors(_log_lines(world.tools.log_dir(name))):
                self._problem("log", f"{name}: {line[:1000]}")

    def _check_measured(self) -> None:
        """Check memory and goodput, if the run was long enough to need them."""
        options, world = self._options, self._world
        if options.is_long:
            for text in self._memory.problems((*SERVICES, REDIS), resources.memory_of(world)):
                self._problem("memory", text)
        if options.needs_goodput:
            goodput = self._result.goodput
            for text in goodput.problems(needs_all=options.needs_all_roles) if goodput else ["not measured"]:
                self._problem("goodput", text)

    def _take(self, problems: Sequence[Problem]) -> None:
        self._result.problems += map(str, problems)

    def _problem(self, kind: str, text: str) -> None:
        self._result.problems.append(f"{kind}: {text}")


def _known_tokens(case: Case) -> list[int] | None:
    """Return the tokens of a case that the emulated model gives, if they can be computed here."""
    body = case.body
    is_several = "prompt" in body and isinstance(body["prompt"][0], list)
    if "prompt" not in body or is_several or "min_tokens" in body or not body["ignore_eos"] or case.has_rules:
        return None
    seed = 0 if body["temperature"] == 0.0 else body["seed"]
    return emulated_answer(body["prompt"], seed=seed, max_tokens=body["max_tokens"], vocab_size=VOCAB_SIZE)


def _log_lines(directory: Path) -> list[str]:
    return [line for path in sorted(directory.glob("*.log*")) for line in path.read_text(errors="replace").splitlines()]
