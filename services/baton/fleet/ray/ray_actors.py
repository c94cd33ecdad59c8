"""Workers' actors, as Ray knows them: by name, for a detached one. All of this runs on the thread that calls
Ray, and waits for nobody."""

from collections.abc import Collection
from typing import Any

from baton.fleet.ray.node_resources import Demand
from baton.fleet.ray.ray_calls import the_ray
from baton.fleet.ray.worker_actor import WorkerActor
from baton.fleet.worker_plan import WorkerSpec

PREFIX = "worker-"
"""Of their names, before the worker's id."""


def find_actor(worker_id: str) -> Any:
    """The detached actor of that worker; None where there is none, or none any more."""
    try:
        return the_ray().get_actor(f"{PREFIX}{worker_id}")
    except ValueError:
        return None


def create_actor(spec: WorkerSpec, options: dict[str, Any], *, is_detached: bool) -> Any:
    """A detached actor is known by its name, under which the next driver finds it; one of ours alone needs
    none, and its successor need not wait until Ray has forgotten the name."""
    options = {"max_restarts": 0, "max_concurrency": 4, "num_cpus": 0, **options}
    if is_detached:
        options |= {"name": f"{PREFIX}{spec.worker_id}", "lifetime": "detached", "get_if_exists": True}
    return the_ray().remote(WorkerActor).options(**options).remote(spec.cores, spec.gpu)


def kill_actor(actor: Any) -> None:
    """Ray ends it a little later, and then lets go of its name."""
    the_ray().kill(actor, no_restart=True)


def other_actors(ours: Collection[str]) -> dict[str, Any]:
    """By their ids, the actors of all workers of this cluster that are none of ours."""
    names = (name for name in the_ray().util.list_named_actors() if name.startswith(PREFIX))
    ids = sorted({name.removeprefix(PREFIX) for name in names}.difference(ours))
    return {worker_id: actor for worker_id in ids if (actor := find_actor(worker_id)) is not None}


def ask_where(ours: Collection[str]) -> dict[str, Any]:
    """By their ids, what others than ours will say of the node that they are on, once they are on one."""
    return {worker_id: actor.node_id.remote() for worker_id, actor in other_actors(ours).items()}


def drain_others(ours: Collection[str]) -> list[str]:
    """The ids of those that were asked to."""
    others = other_actors(ours)
    for actor in others.values():
        actor.drain.remote()
    return list(others)


def options_of(demand: Demand, selector: dict[str, str]) -> dict[str, Any]:
    """What is asked of a node, in the words of Ray's `options`."""
    options: dict[str, Any] = {
        "num_cpus": demand.num_cpus,
        "num_gpus": demand.num_gpus,
        "resources": dict(demand.resources),
    }
    if demand.spread:
        options["scheduling_strategy"] = "SPREAD"
    if selector:
        options["label_selector"] = selector
    return options
