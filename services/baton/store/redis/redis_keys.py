"""Every key that Baton uses in Redis. The cluster's name stands in braces, so that all keys of a cluster live
on one shard."""

from dataclasses import dataclass

from baton.core.ids import WorkerRef
from baton.core.interfaces import MemberKind

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
        """Set of the ids that have been announced; those whose hash has ended are taken out when the set is
        read."""
        return f"baton:{{{self.cluster}}}:members:{kind.value}"

    def decisions(self, request_id: bytes) -> str:
        """Hash {attempt: record} of one request."""
        return f"baton:{{{self.cluster}}}:decision:{request_id.hex()}"

    @property
    def last_decision(self) -> str:
        """The id, in hex, of the request whose record was put last."""
        return f"baton:{{{self.cluster}}}:last-decision"

    def kv_events(self, worker: WorkerRef) -> str:
        """Stream of one life's block events; the id of an entry is `{event_seq}-0`. Ends when the worker
        renews it no more."""
        return f"baton:{{{self.cluster}}}:kv:{worker.worker_id}:{worker.worker_epoch:016x}"

    def kv_snapshot(self, worker: WorkerRef) -> str:
        """What that life holds, as of one event. Ends as the stream does."""
        return f"baton:{{{self.cluster}}}:kv-snapshot:{worker.worker_id}:{worker.worker_epoch:016x}"

    def costs(self, key: str) -> str:
        """What engine steps cost, as JSON. Ends when no worker of that kind has told it for long."""
        return f"baton:{{{self.cluster}}}:costs:{key}"
