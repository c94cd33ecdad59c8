"""Queue of jobs of several tenants, in which each tenant gets an equal share of the time."""

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class TenantQueue(Generic[T]):
    """Takes the jobs of the tenant that has used the least time next (start-time fair queueing)."""

    def __init__(self) -> None:
        self._jobs: dict[str, deque[tuple[T, int]]] = {}
        self._sizes: dict[str, int] = {}  # of tenants with jobs
        self._used_s: dict[str, float] = {}  # of tenants with jobs, counted from the beginning of the queue
        self._now_s = 0.0  # time used by the tenant whose job was taken last

    def __len__(self) -> int:
        return sum(map(len, self._jobs.values()))

    @property
    def size(self) -> int:
        """Sum of the sizes of all jobs."""
        return sum(self._sizes.values())

    def size_of(self, tenant: str) -> int:
        """Return the sum of the sizes of a tenant's jobs."""
        return self._sizes.get(tenant, 0)

    def put(self, tenant: str, job: T, size: int = 1) -> None:
        """Add a job. A tenant without jobs begins with the time of the tenant that is served."""
        if tenant not in self._jobs:
            self._jobs[tenant] = deque()
            self._used_s[tenant] = max(self._used_s.get(tenant, 0.0), self._now_s)
        self._jobs[tenant].append((job, size))
        self._sizes[tenant] = self._sizes.get(tenant, 0) + size

    def take(self) -> tuple[str, T]:
        """Remove and return the next job and its tenant. Raises IndexError if there is none."""
        if not self._jobs:
            raise IndexError("the queue is empty")
        tenant = min(self._jobs, key=lambda name: self._used_s[name])
        self._now_s = self._used_s[tenant]
        jobs = self._jobs[tenant]
        job, size = jobs.popleft()
        self._sizes[tenant] -= size
        if not jobs:
            del self._jobs[tenant], self._sizes[tenant]
        return tenant, job

    def charge(self, tenant: str, used_s: float) -> None:
        """Count the time that a job has taken."""
        self._used_s[tenant] = self._used_s.get(tenant, self._now_s) + used_s
        for name in [n for n, s in self._used_s.items() if n not in self._jobs and s <= self._now_s]:
            del self._used_s[name]
