"""Draws the attributes of a workload's clients: tenant, priority, SLO class, and whether they cancel.

A client is a session, or a request without one. Each attribute has its own random stream, in the order in
which clients first appear.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from loadgen import text_forms
from loadgen.loadgen_errors import BadPlan
from loadgen.plan import draws
from loadgen.plan.plan import PlannedRequest
from loadgen.slo_target import SloTarget

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Mix(Generic[T]):
    """Values with their relative shares (any positive weights)."""

    values: tuple[T, ...]
    weights: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixes:
    """Mixes of all client attributes. None keeps what the source set.

    `cancel` is the share of clients that cancel during their last request, after 1 to `output_tokens - 1`
    tokens with equal probability. One-token responses cannot be cancelled.
    """

    tenants: Mix[str] | None = None
    priorities: Mix[int] | None = None
    classes: Mix[str] | None = None
    cancel: float = 0.0
    slos: Mapping[str, SloTarget] = field(default_factory=lambda: {"default": SloTarget()})


def apply_mixes(requests: Sequence[PlannedRequest], mixes: Mixes, seed: int) -> list[PlannedRequest]:
    """Return the requests with the drawn attributes of their clients."""
    numbers: dict[str | int, int] = {}
    clients = [numbers.setdefault(request.session or request.index, len(numbers)) for request in requests]
    count = len(numbers)
    last_of = {client: request.index for client, request in zip(clients, requests, strict=True)}
    tenants = _drawn(mixes.tenants, seed, "tenants", count)
    priorities = _drawn(mixes.priorities, seed, "priorities", count)
    classes = _drawn(mixes.classes, seed, "classes", count)
    cancels = draws.stream(seed, "cancel").random((count, 2)).tolist()
    mixed = []
    for client, request in zip(clients, requests, strict=True):
        chance, part = cancels[client]
        does_cancel = chance < mixes.cancel and last_of[client] == request.index and request.output_tokens > 1
        mixed.append(
            dataclasses.replace(
                request,
                tenant=request.tenant if tenants is None else tenants[client],
                priority=request.priority if priorities is None else priorities[client],
                slo_class=request.slo_class if classes is None else classes[client],
                cancel_after_tokens=1 + int(part * (request.output_tokens - 1))
                if does_cancel
                else request.cancel_after_tokens,
            )
        )
    return mixed


def parse_tenants(text: str) -> Mix[str]:
    """Parse names and weights, `a:3,b:1`. Raises BadPlan."""
    return _mix(text, "a:3,b:1")


def parse_priorities(text: str) -> Mix[int]:
    """Parse priorities (lower is more urgent) and weights, `0:9,5:1`. Raises BadPlan."""
    mix = _mix(text, "0:9,5:1")
    try:
        return Mix(tuple(int(name) for name in mix.values), mix.weights)
    except ValueError:
        raise BadPlan(f"`{text}`: priorities must be integers, such as 0:9,5:1") from None


def parse_classes(texts: Sequence[str]) -> tuple[Mix[str], dict[str, SloTarget]]:
    """Parse SLO classes of the form `interactive:0.7:ttft=500ms,tpot=50ms`: name, weight and optional SLO.

    Raises BadPlan or BadSlo.
    """
    names, weights, slos = [], [], {}
    for text in texts:
        name, _, rest = text.partition(":")
        weight, _, slo = rest.partition(":")
        if not name.strip() or not weight.strip():
            raise BadPlan(f"`{text}` is not a class; write interactive:0.7:ttft=500ms,tpot=50ms")
        if name.strip() in slos:
            raise BadPlan(f"the class `{name.strip()}` is given twice; give it once")
        slos[name.strip()] = SloTarget.parse(slo)
        names.append(name.strip())
        weights.append(_weight(weight, text))
    return Mix(tuple(names), tuple(weights)), slos


def _mix(text: str, example: str) -> Mix[str]:
    names, weights = [], []
    for part in text.split(","):
        name, colon, weight = part.strip().rpartition(":")
        if not colon or not name:
            raise BadPlan(f"`{part}` in `{text}`: write {example}")
        if name in names:
            raise BadPlan(f"`{text}` contains `{name}` twice; give it once")
        names.append(name)
        weights.append(_weight(weight, text))
    return Mix(tuple(names), tuple(weights))


def _weight(text: str, full_text: str) -> float:
    weight = text_forms.number(text)
    if weight <= 0:
        raise BadPlan(f"`{full_text}`: a weight must be above 0")
    return weight


def _drawn(mix: Mix[T] | None, seed: int, purpose: str, count: int) -> list[T] | None:
    """Return a value for each of `count` clients."""
    if mix is None:
        return None
    return [mix.values[choice] for choice in draws.choose(draws.stream(seed, purpose), mix.weights, count)]
