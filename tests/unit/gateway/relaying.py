"""What tests of a request's path ask for, and a worker that dies while it answers."""

from baton.core.ids import JobId
from tests.unit.gateway.fakes import StubWorker

PROMPT = "hello"


def kill_at(index: int, sample: int = 0):
    """A hook that kills the worker before it sends that token."""

    def hook(worker: StubWorker, job: JobId, at_sample: int, at_index: int) -> None:
        if (at_sample, at_index) == (sample, index):
            worker.die()

    return hook
