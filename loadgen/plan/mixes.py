"""Who the clients of a workload are: tenant, priority, SLO class, and whether they leave before the answer's
end.

A client is a session, or a request of none. Each property is drawn from its own stream, in the order in which
clients first appear.
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
    """Values, each with its share: any positive weights."""

    values: tuple[T, ...]
    weights: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixes:
    """`cancel`: the fraction of clients that leave during their last request, after 1 to `output_tokens - 1`
    tokens, each as likely (one-token answers cannot be left). None: as the source says."""

    tenants: Mix[str] | None = None
    priorities: Mix[int] | None = None
    classes: Mix[str] | None = None
    cancel: float = 0.0
    slos: Mapping[str, SloTarget] = field(default_factory=lambda: {"default": SloTarget()})


def apply_mixes(requests: Sequence[PlannedRequest], mixes: Mixes, seed: int) -> list[PlannedRequest]:
    """The requests, with what `mixes` decides of each client."""
    numbers: dict[str | int, int] = {}
    clients = [numbers.setdefault(request.session or request.index, len(numbers)) for request in requests]
    count = len(numbers)
    last_of = {client: request.index for client, request in zip(clients, requests, strict=True)}
    tenants = _drawn(mixes.tenants, seed, "tenants", count)
    priorities = _drawn(mixes.priorities, seed, "priorities", count)
    classes = _drawn(mixes.classes, seed, "classes", count)
    leaving = draws.stream(seed, "cancel").random((count, 2)).tolist()
    mixed = []
    for client, request in zip(clients, requests, strict=True):
        leaves, part = leaving[client]
        does_leave = leaves < mixes.cancel and last_of[client] == request.index and request.output_tokens > 1
        mixed.append(
            dataclasses.replace(
                request,
                tenant=request.tenant if tenants is None else tenants[client],
                priority=request.priority if priorities is None else priorities[client],
                slo_class=request.slo_class if classes is None else classes[client],
                cancel_after_tokens=1 + int(part * (request.output_tokens - 1))
                if does_leave
                else request.cancel_after_tokens,
            )
        )
    return mixed


def parse_tenants(text: str) -> Mix[str]:
    """`a:3,b:1`: names and weights. Raises BadPlan."""
    return _mix(text, "a:3,b:1")


def parse_priorities(text: str) -> Mix[int]:
    """`0:9,5:1`: priorities (lower goes first) and weights. Raises BadPlan."""
    mix = _mix(text, "0:9,5:1")
    try:
        return Mix(tuple(int(name) for name in mix.values), mix.weights)
    except ValueError:
        raise BadPlan(f"`{text}`: priorities are whole numbers, such as 0:9,5:1") from None


def parse_classes(texts: Sequence[str]) -> tuple[Mix[str], dict[str, SloTarget]]:
    """Of each `interactive:0.7:ttft=500ms,tpot=50ms` (name, weight, SLO; the SLO may be left out). Raises
    BadPlan or BadSlo."""
    names, weights, slos = [], [], {}
    for text in texts:
        name, _, rest = text.partition(":")
        weight, _, slo = rest.partition(":")
        if not name.strip() or not weight.strip():
            raise BadPlan(f"`{text}` is no class: write interactive:0.7:ttft=500ms,tpot=50ms")
        if name.strip() in slos:
            raise BadPlan(f"the class `{name.strip()}` is given twice")
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
            raise BadPlan(f"`{name}` stands twice in `{text}`")
        names.append(name)
        weights.append(_weight(weight, text))
    return Mix(tuple(names), tuple(weights))


def _weight(text: str, whole: str) -> float:
    weight = text_forms.number(text)
    if weight <= 0:
        raise BadPlan(f"`{whole}`: a weight is above 0")
    return weight


def _drawn(mix: Mix[T] | None, seed: int, purpose: str, count: int) -> list[T] | None:
    """A value of each of `count` clients."""
    if mix is None:
        return None
    return [mix.values[choice] for choice in draws.choose(draws.stream(seed, purpose), mix.weights, count)]
