"""A fake Ray: nodes offer resources, and actors wait for them, live and end under control of a test."""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from baton.fleet.ray.ray_connection import RayConnection
from baton.fleet.ray.ray_nodes import NODE_LABEL
from baton.fleet.ray.release_check import Release, release_probe
from baton.fleet.ray.worker_actor import WorkerFacts

NO_PID = 2**22 + 1
"""Larger than any pid of Linux."""


class Died(Exception):
    """The error that callers of a dead actor get."""


class Reference:
    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def future(self) -> Future[Any]:
        return self._future


def copy_of(answer: Future[Any]) -> Future[Any]:
    """A separate future for each caller, so that a caller that gives up cancels only its own."""
    future: Future[Any] = Future()

    def settle(answer: Future[Any]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        if (error := answer.exception()) is not None:
            future.set_exception(error)
        else:
            future.set_result(answer.result())

    answer.add_done_callback(settle)
    return future


@dataclass(eq=False)
class FakeActor:
    """`starts`: the settings of each successful start."""

    ray: "FakeRay"
    name: str
    options: Mapping[str, Any]
    node: str = ""
    starts: list[Mapping[str, Any]] = field(default_factory=list)
    is_dead: bool = False
    placed: Future[str] = field(default_factory=Future)
    ended: Future[str] = field(default_factory=Future)

    def __getattr__(self, method: str) -> Any:
        if method not in ("activities", "node_id", "pid", "start", "wait", "drain", "stop"):
            raise AttributeError(method)
        return SimpleNamespace(remote=lambda *arguments: Reference(self.ray.called(self, method, arguments)))

    @property
    def demand(self) -> dict[str, float]:
        asked = {
            "CPU": self.options.get("num_cpus", 0),
            "GPU": self.options.get("num_gpus", 0),
            **self.options.get("resources", {}),
        }
        return {name: amount for name, amount in asked.items() if amount}

    def end(self, why: str) -> None:
        """End the worker with this reason. The actor stays until it is killed."""
        self.ended.set_result(why)

    def die(self, why: str = "the process has died") -> None:
        self.ray.kill(self, why=why)


class FakeRay:
    """A Ray cluster.

    start_errors: errors that the next starts of a worker raise, by worker id.
    start_s: seconds that a start takes, by worker id.
    activities: what each worker says while it starts.
    releases: Baton release of a node if it is not the release of this process, by node.
    kept_names: names of actors that stay in use after the actor's death.
    """

    def __init__(self, **nodes: Mapping[str, float]) -> None:
        self._lock = threading.RLock()
        self.resources: dict[str, Mapping[str, float]] = dict(nodes)
        self.releases: dict[str, Release] = {}
        self.start_errors: dict[str, list[Exception]] = {}
        self.start_s: dict[str, float] = {}
        self.activities: tuple[str, ...] = ()
        self.kept_names: set[str] = set()
        self.actors: list[FakeActor] = []
        self.util = SimpleNamespace(list_named_actors=lambda: [actor.name for actor in self.living if actor.name])

    # Controls for tests.

    def add(self, node: str, **resources: float) -> None:
        with self._lock:
            self.resources[node] = resources
            self._place()

    def lose(self, node: str) -> None:
        """Remove a node and kill the actors on it."""
        with self._lock:
            del self.resources[node]
            for actor in [actor for actor in self.living if actor.node == node]:
                actor.die("its node has died")

    @property
    def living(self) -> list[FakeActor]:
        return [actor for actor in self.actors if not actor.is_dead]

    @property
    def where(self) -> dict[str, str]:
        """The node of each serving worker, by worker id."""
        return {actor.starts[-1]["worker_id"]: actor.node for actor in self.living if actor.starts}

    def serving(self, worker_id: str) -> FakeActor:
        return next(actor for actor in self.living if actor.starts and actor.starts[-1]["worker_id"] == worker_id)

    # The part of the Ray API that the fleet uses.

    def nodes(self) -> list[dict[str, Any]]:
        with self._lock:
            return [
                {
                    "NodeID": name,
                    "NodeManagerHostname": name,
                    "NodeManagerAddress": f"at-{name}",
                    "Alive": True,
                    "Resources": dict(resources),
                }
                for name, resources in self.resources.items()
            ]

    def remote(self, what: Any) -> Any:
        make: Callable[..., Any] = self._make_actor if isinstance(what, type) else self._probe
        return SimpleNamespace(options=lambda **options: SimpleNamespace(remote=lambda *arguments: make(options)))

    def get_actor(self, name: str) -> FakeActor:
        for actor in reversed(self.actors):
            if actor.name == name and (not actor.is_dead or name in self.kept_names):
                return actor
        raise ValueError(name)

    def kill(self, actor: FakeActor, *, no_restart: bool = True, why: str = "killed") -> None:
        with self._lock:
            actor.is_dead = True
            for future in (actor.placed, actor.ended):
                if not future.done():
                    future.set_exception(Died(why))
            self._place()

    def wait(self, references: Sequence[Reference], *, num_returns: int, timeout: float) -> None:
        """Called by a fleet that closes."""

    def shutdown(self) -> None:
        """Detached actors stay."""

    def called(self, actor: FakeActor, method: str, arguments: tuple[Any, ...]) -> Future[Any]:
        if method == "node_id":
            return copy_of(actor.placed)
        if method == "wait":
            return copy_of(actor.ended)
        future: Future[Any] = Future()
        if method == "activities" and (new := list(self.activities[arguments[0] :])):
            future.set_result(new[:1])  # as if the next one came later
        if method == "pid":
            future.set_exception(Died("it is dead")) if actor.is_dead else future.set_result(NO_PID)
        if method == "start":
            actor.placed.add_done_callback(lambda placed: self._start_later(actor, future, *arguments))
        elif method in ("drain", "stop") and not actor.ended.done():
            actor.end("")
        return future

    def _start_later(self, actor: FakeActor, future: Future[Any], settings: Mapping[str, Any], *_: Any) -> None:
        if takes_s := self.start_s.get(settings["worker_id"]):
            threading.Timer(takes_s, self._start, (actor, future, settings)).start()
        else:
            self._start(actor, future, settings)

    def _start(self, actor: FakeActor, future: Future[Any], settings: Mapping[str, Any]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        worker_id = settings["worker_id"]
        if actor.is_dead or actor.ended.done():
            future.set_exception(Died("the worker has ended"))
        elif errors := self.start_errors.get(worker_id):
            future.set_exception(errors.pop(0) if len(errors) > 1 else errors[0])
        else:
            actor.starts.append(settings)
            epoch = self.actors.index(actor)
            at = {"pid": epoch, "host": actor.node, "node_id": actor.node, "address": f"at-{actor.node}:1"}
            future.set_result(WorkerFacts(worker_id=worker_id, worker_epoch=epoch, summary="", start_s=0.0, **at))

    def _make_actor(self, options: Mapping[str, Any]) -> FakeActor:
        with self._lock:
            name = options.get("name", "")
            if options.get("get_if_exists") and name in self.util.list_named_actors():
                return self.get_actor(name)
            actor = FakeActor(ray=self, name=name, options=options)
            self.actors.append(actor)
            self._place()
            return actor

    def _probe(self, options: Mapping[str, Any]) -> Reference:
        future: Future[Any] = Future()
        future.set_result(self.releases.get(options["label_selector"][NODE_LABEL], release_probe()()))
        return Reference(future)

    def _place(self) -> None:
        for actor in self.living:
            barred = (
                actor.options.get("label_selector", {})
                .get(NODE_LABEL, "!in()")
                .removeprefix("!in(")
                .removesuffix(")")
                .split(",")
            )
            for node in self.resources:
                if not actor.node and node not in barred and self._has_free(node, actor.demand):
                    actor.node = node
                    actor.placed.set_result(node)

    def _has_free(self, node: str, demand: Mapping[str, float]) -> bool:
        taken = [actor.demand for actor in self.living if actor.node == node]
        return all(
            self.resources[node].get(name, 0) - sum(each.get(name, 0) for each in taken) >= n
            for name, n in demand.items()
        )


class FakeConnection(RayConnection):
    """A connection whose Ray is a `FakeRay`. `join` and `start` call the given functions."""

    def __init__(self, ray: FakeRay | None = None, *, connect: Callable[[], object] = lambda: "10.0.0.1") -> None:
        self._ray = ray
        self._connect = connect

    @property
    def api(self) -> Any:
        return self._ray

    def start(self, ray_dir: Path, memory_limit: float | None) -> str:
        return str(self._connect())

    def join(self, address: str, namespace: str) -> str:
        return str(self._connect())
