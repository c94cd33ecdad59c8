"""Names of all keys that Baton uses in Redis.

The cluster name is in braces (a hash tag), so that all keys of a cluster are on one shard.
"""

from dataclasses import dataclass

from baton.core.ids import WorkerRef
from baton.core.interfaces import MemberKind

DEFAULT_CLUSTER = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """Redis keys of one cluster."""

    cluster: str = DEFAULT_CLUSTER

    def member(self, kind: MemberKind, member_id: str) -> str:
        """Hash {epoch, value} of one member; expires with its announcement."""
        return self.member_prefix(kind) + member_id

    def member_prefix(self, kind: MemberKind) -> str:
        """Common prefix of all `member` keys of a kind."""
        return f"baton:{{{self.cluster}}}:member:{kind.value}:"

    def members(self, kind: MemberKind) -> str:
        """Set of announced member ids; ids whose hash has expired are removed when the set is read."""
        return f"baton:{{{self.cluster}}}:members:{kind.value}"

    def decisions(self, request_id: bytes) -> str:
        """Hash {attempt: decision record} of one request."""
        return self.decision_prefix + request_id.hex()

    @property
    def decision_prefix(self) -> str:
        """Common prefix of all `decisions` keys."""
        return f"baton:{{{self.cluster}}}:decision:"

    @property
    def decision_index(self) -> str:
        """Sorted set of the ids in hex of the requests with records, oldest first."""
        return f"baton:{{{self.cluster}}}:decision-index"

    @property
    def decision_sizes(self) -> str:
        """Hash of the size of each request's records, their sum, and the next rank in `decision_index`."""
        return f"baton:{{{self.cluster}}}:decision-sizes"

    @property
    def last_decision(self) -> str:
        """Id in hex of the request whose decision record was written last."""
        return f"baton:{{{self.cluster}}}:last-decision"

    def kv_events(self, worker: WorkerRef) -> str:
        """Stream of block events of one worker incarnation, with entry ids `{event_seq}-0`.

        Expires unless the worker renews it.
        """
        return self.kv_event_prefix + kv_field(worker)

    @property
    def kv_event_prefix(self) -> str:
        """Common prefix of all `kv_events` keys."""
        return f"baton:{{{self.cluster}}}:kv:"

    def kv_snapshot(self, worker: WorkerRef) -> str:
        """Snapshot of the blocks of one worker incarnation as of one event; expires with the stream."""
        return self.kv_snapshot_prefix + kv_field(worker)

    @property
    def kv_snapshot_prefix(self) -> str:
        """Common prefix of all `kv_snapshot` keys."""
        return f"baton:{{{self.cluster}}}:kv-snapshot:"

    @property
    def kv_sizes(self) -> str:
        """Hash {`kv_field`: memory of stream and snapshot} of all worker incarnations.

        `:total` is their sum. `:looked` is the Unix time in seconds of the last search for ended ones.
        """
        return f"baton:{{{self.cluster}}}:kv-sizes"

    def costs(self, key: str) -> str:
        """Step cost model as JSON; expires unless a worker of that kind writes it again."""
        return f"baton:{{{self.cluster}}}:costs:{key}"


def kv_field(worker: WorkerRef) -> str:
    """Name of a worker incarnation in `Keys.kv_sizes`, and the end of its keys."""
    return f"{worker.worker_id}:{worker.worker_epoch:016x}"
