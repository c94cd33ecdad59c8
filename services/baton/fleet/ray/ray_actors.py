"""Creates, finds and kills worker actors through the Ray API.

All functions run on the Ray thread and do not wait for an actor. `ray` is the `ray` module.
"""

from collections.abc import Collection
from typing import Any

from baton.fleet.ray.node_resources import Demand
from baton.fleet.ray.worker_actor import WorkerActor
from baton.fleet.worker_plan import WorkerSpec

NAME_PREFIX = "worker-"
"""Prefix of actor names. The worker id follows."""


def find_actor(ray: Any, worker_id: str) -> Any:
    """Return the detached actor of a worker, or None if it does not exist (any more)."""
    try:
        return ray.get_actor(f"{NAME_PREFIX}{worker_id}")
    except ValueError:
        return None


def create_actor(ray: Any, spec: WorkerSpec, options: dict[str, Any], *, is_detached: bool) -> Any:
    """Create the actor of a worker.

    A detached actor has a name by which the next driver finds it. Other actors have none, so that a
    replacement does not have to wait until Ray frees the name.
    """
    options = {"max_restarts": 0, "max_concurrency": 4, "num_cpus": 0, **options}
    if is_detached:
        options |= {"name": f"{NAME_PREFIX}{spec.worker_id}", "lifetime": "detached", "get_if_exists": True}
    return ray.remote(WorkerActor).options(**options).remote(spec.cores, spec.gpu)


def kill_actor(ray: Any, actor: Any) -> None:
    """Kill an actor. Ray ends its process and frees its name some time later."""
    ray.kill(actor, no_restart=True)


def unmanaged_actors(ray: Any, managed: Collection[str]) -> dict[str, Any]:
    """Return the detached actors of this cluster, by worker id, that are not in `managed`."""
    names = (name for name in ray.util.list_named_actors() if name.startswith(NAME_PREFIX))
    ids = sorted({name.removeprefix(NAME_PREFIX) for name in names}.difference(managed))
    return {worker_id: actor for worker_id in ids if (actor := find_actor(ray, worker_id)) is not None}


def request_node_ids(ray: Any, managed: Collection[str]) -> dict[str, Any]:
    """Ask the unmanaged actors for their node ids. Return the object references by worker id.

    The reference of an actor that waits for a node stays pending.
    """
    return {worker_id: actor.node_id.remote() for worker_id, actor in unmanaged_actors(ray, managed).items()}


def drain_unmanaged(ray: Any, managed: Collection[str]) -> list[str]:
    """Tell the unmanaged actors to drain. Return their worker ids."""
    actors = unmanaged_actors(ray, managed)
    for actor in actors.values():
        actor.drain.remote()
    return list(actors)


def actor_options(demand: Demand, label_selector: dict[str, str]) -> dict[str, Any]:
    """Translate a demand and a label selector into options of a Ray actor."""
    options: dict[str, Any] = {
        "num_cpus": demand.num_cpus,
        "num_gpus": demand.num_gpus,
        "resources": dict(demand.resources),
    }
    if demand.spread:
        options["scheduling_strategy"] = "SPREAD"
    if label_selector:
        options["label_selector"] = label_selector
    return options
