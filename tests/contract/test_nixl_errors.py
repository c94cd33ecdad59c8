"""Errors of NIXL end a read only if NIXL says so; errors of the notification call are retried, then fatal."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from baton.transfer.backend import ReadState
from baton.transfer.backends.nixl import nixl_errors
from tests.contract.failing_nixl_agent import FailingAgent, failing_agents, nixl_error
from tests.contract.transfer_backends import BACKENDS, Pair

pytestmark = pytest.mark.contract
BLOCKS = {0: 9, 4: 10}
nixl_backends = pytest.mark.parametrize("backend", ["nixl", "staged-nixl"])
WITHOUT_END = ("nixlBackendError", "nixlCancelledError", "nixlInvalidParamError", "nixlUnknownError", "RuntimeError")


@asynccontextmanager
async def failing_pair(backend: str = "nixl") -> AsyncIterator[tuple[Pair, FailingAgent]]:
    """Yield a connected pair that has read once, and the agent of its reader."""
    with failing_agents() as agents:
        async with BACKENDS[backend]() as pair:
            assert await pair.read({1: 1}) is ReadState.DONE
            yield pair, agents[pair.reader.worker.worker_id]
            agents[pair.reader.worker.worker_id].errors.clear()


async def assert_in_doubt(pair: Pair, blocks: dict[int, int]) -> int:
    """Start a read that fails without an end. Returns its id."""
    read_id = pair.start(blocks)
    assert await pair.reader.backend.wait(read_id) is ReadState.IN_DOUBT
    assert pair.reader.backend.poll(read_id) is ReadState.IN_DOUBT
    with pytest.raises(ValueError, match="in doubt"):
        pair.reader.backend.release(read_id)
    return read_id


@nixl_backends
@pytest.mark.parametrize("error", WITHOUT_END)
async def test_failed_post_of_unknown_end_leaves_the_read_in_doubt(backend: str, error: str) -> None:
    async with failing_pair(backend) as (pair, agent):
        agent.errors = {"transfer": error, "check_xfer_state": error}
        await assert_in_doubt(pair, BLOCKS)
        agent.errors.clear()
        assert await pair.read({2: 2}) is ReadState.DONE
        assert pair.reader.backend.failure is None


@nixl_backends
async def test_read_in_doubt_ends_when_the_transport_reports_it(backend: str) -> None:
    async with failing_pair(backend) as (pair, agent):
        agent.errors = {"transfer": "nixlBackendError", "check_xfer_state": "nixlBackendError"}
        read_id = await assert_in_doubt(pair, BLOCKS)
        del agent.errors["transfer"]
        async with asyncio.timeout(30):
            while agent.counts.get("check_xfer_state", 0) < 3:  # the polls of the read in doubt raise
                await pair.read({2: 2})  # wakes the thread
        assert pair.reader.backend.poll(read_id) is ReadState.IN_DOUBT
        agent.errors.clear()
        await pair.read({2: 2})
        assert await asyncio.wait_for(pair.reader.backend.wait_ended(read_id), 30) is ReadState.FAILED
        pair.reader.backend.release(read_id)


@nixl_backends
async def test_failed_connection_ends_all_reads_in_doubt_of_its_peer(backend: str) -> None:
    async with failing_pair(backend) as (pair, agent):
        agent.errors = {"transfer": "nixlBackendError", "check_xfer_state": "nixlBackendError"}
        read_id = await assert_in_doubt(pair, BLOCKS)
        agent.errors = {"transfer": "nixlRemoteDisconnectError", "check_xfer_state": "nixlBackendError"}
        assert await pair.read({2: 2}) is ReadState.FAILED
        assert await asyncio.wait_for(pair.reader.backend.wait_ended(read_id), 30) is ReadState.FAILED
        pair.reader.backend.release(read_id)
        agent.errors.clear()
        assert await pair.read({3: 3}) is ReadState.DONE  # the peer was loaded again


@nixl_backends
@pytest.mark.parametrize("error", WITHOUT_END)
async def test_failed_poll_of_unknown_end_leaves_the_read_in_doubt(
    backend: str, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with failing_pair(backend) as (pair, agent):
        transfer = agent._inner.transfer
        monkeypatch.setattr(agent._inner, "transfer", lambda handle: (transfer(handle), "PROC")[1])
        agent.errors["check_xfer_state"] = error
        await assert_in_doubt(pair, BLOCKS)
        agent.errors["check_xfer_state"] = "nixlRemoteDisconnectError"
        assert await pair.read({2: 2}) is ReadState.FAILED


@pytest.mark.fault("F-11")
async def test_few_failed_notification_calls_are_retried() -> None:
    async with failing_pair() as (pair, agent):
        for _round in range(2):  # the count starts again after a success
            agent.remaining["get_new_notifs"] = nixl_errors.MAX_NOTIFICATION_ERRORS - 1
            agent.errors["get_new_notifs"] = "nixlBackendError"
            async with asyncio.timeout(60):
                while agent.remaining["get_new_notifs"]:
                    assert await pair.read(BLOCKS) is ReadState.DONE  # wakes the thread
                successes = agent.notifications  # a call that had begun before the errors does not count
                while agent.notifications == successes:
                    assert await pair.read(BLOCKS) is ReadState.DONE
        assert await pair.read({2: 2}) is ReadState.DONE
        assert pair.reader.backend.failure is None


@pytest.mark.fault("F-11")
@nixl_backends
async def test_notification_calls_that_keep_failing_end_the_backend(backend: str) -> None:
    async with failing_pair(backend) as (pair, agent):
        agent.errors["get_new_notifs"] = "nixlBackendError"
        pair.start(BLOCKS)  # wakes the thread
        for _attempt in range(6000):
            if pair.reader.backend.failure is not None:
                break
            await asyncio.sleep(0.01)
        assert "injected" in str(pair.reader.backend.failure)
        assert agent.counts["get_new_notifs"] == nixl_errors.MAX_NOTIFICATION_ERRORS
        assert pair.owner.backend.failure is None


@pytest.mark.parametrize("name", ["nixlRemoteDisconnectError", "nixlNotPostedError", *WITHOUT_END, "nixlNotFoundError"])
def test_only_errors_that_name_an_end_end_a_read(name: str) -> None:
    error = nixl_error(name)
    assert nixl_errors.ends_read(error) == (name in ("nixlRemoteDisconnectError", "nixlNotPostedError"))
    assert nixl_errors.ends_post(error) == (name not in WITHOUT_END)
    assert nixl_errors.ends_connection(error) == (name == "nixlRemoteDisconnectError")
    assert nixl_errors.deletes_handle(error) == (name == "nixlNotFoundError")
