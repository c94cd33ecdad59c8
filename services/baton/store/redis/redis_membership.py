"""Membership in Redis: a hash a member that ends with its announcement, and a set of ids, so that listing is
one round trip."""

import json

from baton.core.interfaces import Member, MemberKind
from baton.core.plain_json import from_plain, to_plain
from baton.runtime.logging import get_logger
from baton.store.redis.redis_connection import RedisConnection
from baton.store.redis.redis_keys import Keys

log = get_logger(__name__)

INDEX_TTL_MS = 86_400_000
"""A cluster that is gone for a day leaves no key behind."""

# KEYS: the set of ids. ARGV: what a member's key begins with. Returns the values of living members, and
# forgets the others.
_LIST = """
local values = {}
for _, id in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  local value = redis.call('HGET', ARGV[1] .. id, 'value')
  if value then values[#values + 1] = value else redis.call('SREM', KEYS[1], id) end
end
return values
"""

# KEYS: the member's key. ARGV: the epoch that leaves. A later life that has announced itself stays.
_WITHDRAW = """
if redis.call('HGET', KEYS[1], 'epoch') == ARGV[1] then redis.call('DEL', KEYS[1]) end
"""


class RedisMembership:
    """Implements `Membership`. A member is known by its id: a new life replaces the old one."""

    def __init__(self, connection: RedisConnection, keys: Keys) -> None:
        self._connection = connection
        self._keys = keys

    async def announce(self, member: Member, ttl_s: float) -> None:
        key, index = self._keys.member(member.kind, member.member_id), self._keys.members(member.kind)
        value = json.dumps(to_plain(member))
        await self._connection.call(
            lambda redis: (
                redis.pipeline(transaction=True)
                .hset(key, mapping={"epoch": str(member.epoch), "value": value})
                .pexpire(key, max(1, round(ttl_s * 1000)))
                .sadd(index, member.member_id)
                .pexpire(index, INDEX_TTL_MS)
                .execute()
            )
        )

    async def withdraw(self, member: Member) -> None:
        key = self._keys.member(member.kind, member.member_id)
        await self._connection.call(lambda redis: redis.eval(_WITHDRAW, 1, key, str(member.epoch)))

    async def members(self, kind: MemberKind) -> tuple[Member, ...]:
        index, prefix = self._keys.members(kind), self._keys.member_prefix(kind)
        values: list[str] = await self._connection.call(lambda redis: redis.eval(_LIST, 1, index, prefix))
        found = (_member(value, kind) for value in values)
        return tuple(sorted((member for member in found if member is not None), key=lambda member: member.member_id))


def _member(value: str, kind: MemberKind) -> Member | None:
    """None for a value that no release of ours wrote: somebody else's mistake must not stop a cluster."""
    try:
        member = from_plain(Member, json.loads(value))
        if member.kind is not kind:
            raise ValueError(f"it is a {member.kind.value}")
    except (ValueError, RecursionError) as error:
        log.warning("member_ignored", kind=kind.value, error=str(error))
        return None
    return member
