"""Remembers when the turns of client sessions end, how long their clients pause, and how long workers have
computed for them, per tenant."""

from collections import OrderedDict, deque
from statistics import median
from sys import getsizeof

from baton.core.cluster.decision_record import SessionTurn
from baton.core.cluster.placement import PlacementQuery

MAX_TABLE_BYTES = 16 * 2**20
"""Upper bound for the memory of the table."""
SESSION_BYTES = 1536
"""Memory of one session without its names."""
NUM_GAPS = 8
"""Last gaps of a session that are remembered."""

SessionKey = tuple[str, str]
"""Tenant and session id. Sessions of different tenants have nothing in common."""


class _Session:
    __slots__ = ("attained_s", "ended_s", "gaps_s", "num_bytes", "num_turns")

    def __init__(self, num_bytes: int) -> None:
        self.num_turns = 0
        self.attained_s = 0.0
        self.ended_s: float | None = None
        self.gaps_s: deque[float] = deque(maxlen=NUM_GAPS)
        self.num_bytes = num_bytes


def session_of_query(query: PlacementQuery) -> SessionKey | None:
    """Return the session of a query, or None if its client has named none."""
    return (query.tenant, query.session_key) if query.session_key else None


class SessionTable:
    """The sessions that a scheduler has placed last. The longest unused are forgotten first."""

    def __init__(self, max_bytes: int = MAX_TABLE_BYTES) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._sessions: OrderedDict[SessionKey, _Session] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of sessions."""
        return len(self._sessions)

    def placed(self, query: PlacementQuery, now_s: float) -> SessionTurn | None:
        """Count a placed request as a turn of its session, unless it is a later attempt.

        Returns its place in the session; None without a session. `now_s`: event loop time.
        """
        key = session_of_query(query)
        if key is None:
            return None
        session = self._sessions.get(key)
        if session is None:
            session = _Session(SESSION_BYTES + getsizeof(key[0]) + getsizeof(key[1]))
            self._sessions[key] = session
            self.num_bytes += session.num_bytes
        self._sessions.move_to_end(key)
        gap_s = None
        if query.attempt == 0 or not session.num_turns:
            session.num_turns += 1
            if session.ended_s is not None:
                gap_s = max(0.0, now_s - query.waited_s - session.ended_s)
                session.gaps_s.append(gap_s)
                session.ended_s = None
        while self.num_bytes > self._max_bytes:
            self.num_bytes -= self._sessions.popitem(last=False)[1].num_bytes
        gaps_s = session.gaps_s
        return SessionTurn(
            turn=session.num_turns,
            gap_s=gap_s,
            median_gap_s=median(gaps_s) if gaps_s else None,
            attained_s=session.attained_s,
        )

    def ended(self, key: SessionKey, now_s: float, service_s: float) -> None:
        """Record that a turn of a session has ended. Ignored if the session has been forgotten.

        service_s: how long workers have computed for the turn
        """
        session = self._sessions.get(key)
        if session is not None:
            session.ended_s = now_s
            session.attained_s += service_s

    def attained_s(self, query: PlacementQuery) -> float:
        """Return how long workers have computed for the ended turns of the query's session.

        0 without a session, or if it has been forgotten.
        """
        key = session_of_query(query)
        session = None if key is None else self._sessions.get(key)
        return 0.0 if session is None else session.attained_s
