"""Transfers of an owner that have ended, remembered so that late messages about them are answered."""

from baton.core.errors import Reason
from baton.core.ids import Incarnation, JobId, TransferId
from baton.transfer.owner.lease_deadlines import Deadlines

PullKey = tuple[Incarnation, TransferId]
Key = JobId | PullKey

MAX_REMEMBERED_TRANSFERS = 65_536


class EndedTransfers:
    """The reason why each transfer ended, for `remember_s` after its end, and for the latest ones only."""

    def __init__(self, remember_s: float) -> None:
        self._remember_s = remember_s
        self._reasons: dict[Key, Reason] = {}
        self._until: Deadlines[Key] = Deadlines()
        self._without_reader: dict[Incarnation, dict[TransferId, None]] = {}

    def __len__(self) -> int:
        return len(self._reasons)

    @property
    def next_deadline_s(self) -> float | None:
        """The time at which `expire` must be called next; None if nothing is remembered."""
        return self._until.next_s

    def reason(self, key: Key) -> Reason | None:
        """Return why a transfer ended, or None if it is not remembered."""
        return self._reasons.get(key)

    def without_reader(self, incarnation: Incarnation) -> tuple[TransferId, ...]:
        """Return the transfers of this reader that it has not ended itself."""
        return tuple(self._without_reader.get(incarnation, ()))

    def add(self, key: Key, reason: Reason, now_s: float) -> None:
        """Remember the end of a transfer. Forgets the oldest ones above the limit."""
        self._reasons[key] = reason
        self._until.drop(key)
        self._until.set(key, now_s + self._remember_s)
        while len(self._reasons) > MAX_REMEMBERED_TRANSFERS:
            self.forget(next(iter(self._reasons)))

    def add_without_reader(self, incarnation: Incarnation, transfer_id: TransferId) -> None:
        """Remember that the reader does not know of this end. Call it before `add`."""
        self._without_reader.setdefault(incarnation, {})[transfer_id] = None

    def forget(self, key: Key) -> None:
        """Forget a transfer. Does nothing if it is unknown."""
        self._until.drop(key)
        self._reasons.pop(key, None)
        if isinstance(key, tuple):
            incarnation, transfer_id = key
            ended = self._without_reader.get(incarnation, {})
            ended.pop(transfer_id, None)
            if not ended:
                self._without_reader.pop(incarnation, None)

    def expire(self, now_s: float) -> None:
        """Forget the transfers that ended long enough ago."""
        for key in self._until.pop_passed(now_s):
            self.forget(key)
