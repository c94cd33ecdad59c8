"""Stores membership in Redis: an expiring hash per member, and a set of ids for listing in one round trip."""

import json

from baton.core.interfaces import Member, MemberKind
from baton.core.plain_json import from_plain, to_plain
from baton.runtime.logging import get_logger
from baton.store.redis.redis_connection import RedisConnection
from baton.store.redis.redis_keys import Keys

log = get_logger(__name__)

INDEX_TTL_MS = 86_400_000
"""Lifetime of the set of ids, after which no key of a stopped cluster remains."""

# KEYS: the set of ids. ARGV: the prefix of member keys. Returns the values of members whose hash exists, and
# removes the other ids.
_LIST = """
local values = {}
for _, id in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  local value = redis.call('HGET', ARGV[1] .. id, 'value')
  if value then values[#values + 1] = value else redis.call('SREM', KEYS[1], id) end
end
return values
"""

# KEYS: the member's key. ARGV: the epoch to withdraw. A later incarnation that has announced itself is kept.
_WITHDRAW = """
if redis.call('HGET', KEYS[1], 'epoch') == ARGV[1] then redis.call('DEL', KEYS[1]) end
"""


class RedisMembership:
    """Implements `Membership`. The id identifies a member, so a new incarnation replaces the old one."""

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
        found = (_parse_member(value, kind) for value in values)
        return tuple(sorted((member for member in found if member is not None), key=lambda member: member.member_id))


def _parse_member(value: str, kind: MemberKind) -> Member | None:
    """Parse a stored member; None if no release of Baton can have written it, so that it stops nothing."""
    try:
        member = from_plain(Member, json.loads(value))
        if member.kind is not kind:
            raise ValueError(f"the stored kind is {member.kind.value}, not {kind.value}")
    except (ValueError, RecursionError) as error:
        log.warning("stored_member_rejected", kind=kind.value, error=str(error))
        return None
    return member
