"""Which requests may be what kills workers. A gateway cannot see which of the requests on a worker has killed
it; it can see which had two such deaths in a row, and let those go on one by one where they are several."""

import asyncio
from collections import OrderedDict

from baton.core.ids import WorkerRef

MAX_DEAD = 256
"""Dead workers whose suspects are remembered: each of these asks within moments."""

Life = tuple[str, int]


class PoisonDetector:
    """Requests under which a worker has died and that have not gone on since, by the workers that have them
    now. `turn` is held by one that must be the only one."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        self._at: dict[Life, set[bytes]] = {}
        self._at_dead: OrderedDict[Life, frozenset[bytes]] = OrderedDict()

    def enter(self, request_id: bytes, worker: WorkerRef) -> None:
        """The worker is given the request."""
        self._at.setdefault(_life(worker), set()).add(request_id)

    def leave(self, request_id: bytes) -> None:
        """The request has gone on, or its attempt is over."""
        for life in [life for life, requests in self._at.items() if request_id in requests]:
            self._at[life].discard(request_id)
            if not self._at[life]:
                del self._at[life]

    def was_only_one(self, request_id: bytes, dead: WorkerRef) -> bool:
        """Whether no other suspect was with this worker when it died, whichever of them asks first."""
        life = _life(dead)
        them = self._at_dead.get(life, frozenset()) | self._at.pop(life, set())
        self._at_dead[life] = them
        if len(self._at_dead) > MAX_DEAD:
            self._at_dead.popitem(last=False)
        return not them - {request_id}


def _life(worker: WorkerRef) -> Life:
    return worker.worker_id, worker.worker_epoch
