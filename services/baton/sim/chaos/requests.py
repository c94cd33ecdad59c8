"""The requests of a storm, and the clients that send them to any living gateway."""

import asyncio
from dataclasses import replace
from random import Random

from baton.core.request import NO_SLO, Slo
from baton.sim.chaos.profile import ChaosProfile
from baton.sim.sim_clients import SimAnswer, SimRequest, expected_answer, run_client
from baton.sim.sim_cluster import SimCluster
from baton.sim.sim_rules import DIGITS, LETTERS, SimRules
from baton.sim.virtual_time import running_loop

VOCAB_SIZE = 251
TIMEOUT_S = 45.0
"""Deadline of most requests. Longer than every fault, so that none may miss it."""


def plan_requests(profile: ChaosProfile, rng: Random, start_s: float, slo: Slo = NO_SLO) -> list[SimRequest]:
    """Return random requests whose prompts share prefixes, so that caches are hit.

    Some clients cancel, some have a stop string, some are in a hurry, and some have rules for the tokens.
    """
    prefixes = [
        tuple(rng.randrange(1, 200) for _ in range(rng.randrange(8, profile.max_prompt_tokens)))
        for _ in range(profile.num_prefixes)
    ]
    requests = []
    for number in range(profile.num_requests):
        prefix = rng.choice(prefixes)[: rng.randrange(1, profile.max_prompt_tokens)]
        tail = tuple(rng.randrange(1, 200) for _ in range(rng.randrange(1, 12)))
        is_hurried = rng.random() < profile.hurried
        request = SimRequest(
            number=number,
            start_s=start_s + rng.uniform(0.0, profile.duration_s),
            prompt=(prefix + tail)[: profile.max_prompt_tokens],
            max_tokens=rng.randrange(1, profile.max_tokens + 1),
            num_samples=rng.choice((1, 1, 1, 2, 3)),
            seed=rng.getrandbits(32),
            timeout_s=rng.uniform(0.05, profile.hurried_s) if is_hurried else TIMEOUT_S,
            cancel_after_s=rng.uniform(0.0, 0.4) if rng.random() < profile.cancelled else None,
            slo=slo,
        )
        if rng.random() < profile.long:
            request = replace(
                request, max_tokens=profile.long_tokens, num_samples=rng.choice((2, 3)), timeout_s=TIMEOUT_S
            )
            requests.append(_with_early_stop(request))
        else:
            requests.append(_with_stop(request, rng) if rng.random() < profile.stopped else request)
    return [_with_options(request, profile, rng) for request in requests]


def _with_options(request: SimRequest, profile: ChaosProfile, rng: Random) -> SimRequest:
    """Return the request with options that workers must follow from any token on, and on any worker."""
    if rng.random() < profile.salted:
        request = replace(request, cache_salt=rng.choice((b"a", b"b")))
    if rng.random() < profile.scored:
        request = replace(request, num_prompt_logprobs=rng.randrange(3))
    if rng.random() >= profile.ruled or request.stop_token is not None:
        return request
    tokens = LETTERS + DIGITS
    words = tuple(tuple(rng.choices(tokens, k=rng.randrange(1, 4))) for _ in range(rng.randrange(4)))
    if rng.random() < 0.5:
        return replace(request, rules=SimRules(alternates=True, bad_words=words))
    return replace(request, rules=SimRules(allowed=tuple(sorted(rng.sample(tokens, k=8))), bad_words=words))


def _with_stop(request: SimRequest, rng: Random) -> SimRequest:
    """Return the request with a stop string that ends one of its samples, if one can."""
    answer = expected_answer(request, rng.randrange(request.num_samples), VOCAB_SIZE)
    stops = [token for token in answer if chr(token).isascii() and chr(token).isprintable()]
    return replace(request, stop_token=rng.choice(stops)) if stops else request


def _with_early_stop(request: SimRequest) -> SimRequest:
    """Return the request with the stop string that ends its samples furthest apart, if one can."""
    answers = [expected_answer(request, index, VOCAB_SIZE) for index in range(request.num_samples)]
    printable = {t for answer in answers for t in answer if chr(t).isascii() and chr(t).isprintable()}

    def ends(token: int) -> list[int]:
        return sorted(answer.index(token) if token in answer else len(answer) for answer in answers)

    if not printable:
        return request
    return replace(request, stop_token=max(sorted(printable), key=lambda token: ends(token)[-1] - ends(token)[0]))


async def send(request: SimRequest, cluster: SimCluster, rng: Random) -> SimAnswer:
    """Send a request at its time to a random gateway that is ready then, and return the answer.

    If none is ready, it goes to one that lives.
    """
    loop = running_loop()
    await asyncio.sleep(max(0.0, request.start_s - loop.time()))
    living = sorted(cluster.gateways)
    name = rng.choice([name for name in living if cluster.gateways[name].health.is_ready] or living)
    return await run_client(
        request, cluster.gateways[name], spawn=lambda call: cluster.call_gateway(name, call), name=name
    )
