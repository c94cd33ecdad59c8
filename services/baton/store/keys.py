"""Every key that Baton uses in Redis. The cluster's name stands in braces, so that all keys of a cluster live on one shard."""

from dataclasses import dataclass

from baton.core.apis import MemberKind

DEFAULT_CLUSTER = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """The keys of one cluster."""

    cluster: str = DEFAULT_CLUSTER

    def member(self, kind: MemberKind, member_id: str) -> str:
        """Hash {epoch, value}; ends with the member's announcement."""
        return self.member_prefix(kind) + member_id

    def member_prefix(self, kind: MemberKind) -> str:
        return f"baton:{{{self.cluster}}}:member:{kind.value}:"

    def members(self, kind: MemberKind) -> str:
        """Set of the ids that have been announced; those whose hash has ended are taken out when the set is read."""
        return f"baton:{{{self.cluster}}}:members:{kind.value}"

    def decisions(self, request_id: bytes) -> str:
        """Hash {attempt: record} of one request."""
        return f"baton:{{{self.cluster}}}:decision:{request_id.hex()}"

    @property
    def last_decision(self) -> str:
        """The id, in hex, of the request whose record was put last."""
        return f"baton:{{{self.cluster}}}:last-decision"
