"""Requests after the storm: each must finish at its first attempt, because all has recovered."""

import asyncio
from random import Random

from baton.gateway.gateway_service import GatewayService
from baton.sim.sim_clients import SimAnswer, SimRequest, run_client
from baton.sim.sim_cluster import SimCluster

NUM_REQUESTS = 8
LIMIT_S = 5.0
FIRST_NUMBER = 1_000_000
"""Number of the first request. Numbers are the requests' ids, so they differ from those of the storm."""


async def run_epilogue(cluster: SimCluster, rng: Random) -> list[SimAnswer]:
    """Send some requests at once to all gateways, and return the answers.

    Raises AssertionError if one does not finish at its first attempt, within `LIMIT_S`.
    """
    names = sorted(cluster.gateways)
    num_failed_before = sum(_num_failed_attempts(gateway) for gateway in cluster.gateways.values())
    answers = await asyncio.gather(
        *(_ask(cluster, names[number % len(names)], _request(number, rng)) for number in range(NUM_REQUESTS))
    )
    for answer in answers:
        if answer.outcome != "finished":
            raise AssertionError(f"after the storm a request ended with {answer.outcome}: {answer.message}")
        answer.check(cluster.model.vocab_size)
    num_failed = sum(_num_failed_attempts(gateway) for gateway in cluster.gateways.values()) - num_failed_before
    if num_failed:
        raise AssertionError(f"{num_failed} attempts failed after the storm")
    return list(answers)


async def _ask(cluster: SimCluster, name: str, request: SimRequest) -> SimAnswer:
    return await run_client(
        request, cluster.gateways[name], spawn=lambda call: cluster.call_gateway(name, call), name=name
    )


def _request(number: int, rng: Random) -> SimRequest:
    return SimRequest(
        number=FIRST_NUMBER + number,
        start_s=0.0,
        prompt=tuple(rng.randrange(1, 200) for _ in range(rng.randrange(40, 100))),
        max_tokens=6,
        seed=rng.getrandbits(32),
        timeout_s=LIMIT_S,
    )


def _num_failed_attempts(gateway: GatewayService) -> int:
    return int(
        sum(
            sample.value
            for metric in gateway.metrics.attempts.collect()
            for sample in metric.samples
            if sample.name.endswith("_total")
        )
    )
