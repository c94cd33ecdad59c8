"""Twins of the Redis stores for one process: `fleet/local`, the simulator, tests. Time is the running event loop's."""

import asyncio
from typing import Generic, TypeVar

from baton.core.apis import Member, MemberKind
from baton.core.cluster import DecisionRecord

KeyT = TypeVar("KeyT")
ValueT = TypeVar("ValueT")


class _Expiring(Generic[KeyT, ValueT]):
    """A dict whose entries end."""

    def __init__(self) -> None:
        self._entries: dict[KeyT, tuple[ValueT, float]] = {}

    def put(self, key: KeyT, value: ValueT, ttl_s: float) -> None:
        self._drop_ended()
        self._entries[key] = (value, _now_s() + ttl_s)

    def get(self, key: KeyT) -> ValueT | None:
        self._drop_ended()
        value, _ = self._entries.get(key, (None, 0.0))
        return value

    def pop(self, key: KeyT) -> None:
        self._entries.pop(key, None)

    def values(self) -> list[ValueT]:
        self._drop_ended()
        return [value for value, _ in self._entries.values()]

    def _drop_ended(self) -> None:
        now_s = _now_s()
        for key in [key for key, (_, end_s) in self._entries.items() if end_s <= now_s]:
            del self._entries[key]


class MemoryMembership:
    """Implements `Membership`. A member is known by its id: a new life replaces the old one."""

    def __init__(self) -> None:
        self._members: _Expiring[tuple[MemberKind, str], Member] = _Expiring()

    async def announce(self, member: Member, ttl_s: float) -> None:
        self._members.put((member.kind, member.member_id), member, ttl_s)

    async def withdraw(self, member: Member) -> None:
        key = (member.kind, member.member_id)
        known = self._members.get(key)
        if known is not None and known.epoch == member.epoch:
            self._members.pop(key)

    async def members(self, kind: MemberKind) -> tuple[Member, ...]:
        return tuple(sorted((m for m in self._members.values() if m.kind is kind), key=lambda member: member.member_id))


class MemoryDecisionStore:
    """Implements `DecisionStore`."""

    def __init__(self) -> None:
        self._records: _Expiring[bytes, dict[int, DecisionRecord]] = _Expiring()
        self._last: _Expiring[None, bytes] = _Expiring()

    async def put(self, record: DecisionRecord, ttl_s: float) -> None:
        attempts = self._records.get(record.request_id) or {}
        self._records.put(record.request_id, {**attempts, record.attempt: record}, ttl_s)
        self._last.put(None, record.request_id, ttl_s)

    async def get(self, request_id: bytes | None) -> tuple[DecisionRecord, ...]:
        if request_id is None:
            request_id = self._last.get(None)
        attempts = (self._records.get(request_id) if request_id is not None else None) or {}
        return tuple(attempts[attempt] for attempt in sorted(attempts))


def _now_s() -> float:
    return asyncio.get_running_loop().time()
