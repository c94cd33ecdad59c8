"""`NixlPayloads`: a copy that never ends fails after its limit, and so do all later ones."""

import os
from math import inf
from pathlib import Path
from typing import Any

import pytest

from baton.transfer.backends.host_memory import Bytes, allocate_private
from baton.worker.disk import nixl_payloads
from baton.worker.disk.nixl_payloads import NixlPayloads
from baton.worker.disk.os_file import OsFile, RawFile
from tests.contract.kv_tiers import disk_tier
from tests.contract.test_kv_tier import A, B, C, block

pytestmark = pytest.mark.integration
BLOCK_BYTES, NUM_ROWS = 4096, 4


class NeverEnds:
    """An agent of NIXL whose copies stay in progress."""

    def __init__(self, agent: Any) -> None:
        self._agent = agent

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)

    def check_xfer_state(self, handle: Any) -> str:
        return "PROC"

    def transfer(self, handle: Any) -> str:
        self._agent.transfer(handle)
        return "PROC"


def test_after_a_copy_that_never_ends_all_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fd = os.open(tmp_path / "kv", os.O_RDWR | os.O_CREAT)
    os.truncate(fd, NUM_ROWS * BLOCK_BYTES)
    file, staging = OsFile(fd), allocate_private(NUM_ROWS, BLOCK_BYTES)
    staging.kv[:] = 7
    payloads = NixlPayloads(file, staging.kv)
    payloads.write([0], [BLOCK_BYTES])
    assert os.pread(fd, BLOCK_BYTES, BLOCK_BYTES) == bytes([7]) * BLOCK_BYTES
    agent = payloads._agent
    monkeypatch.setattr(nixl_payloads, "_MAX_COPY_S", 0.01)
    payloads._agent = NeverEnds(agent)
    with pytest.raises(OSError, match=r"has not ended within 0\.01 s"):
        payloads.read([0], [0])
    payloads._agent = agent
    for copy in (lambda: payloads.read([0], [0]), lambda: payloads.write([0], [0])):
        with pytest.raises(OSError, match="restart the worker"):
            copy()
    payloads.close()
    file.close()
    staging.close()


async def test_the_tier_is_silent_after_a_copy_that_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[NixlPayloads] = []

    def open_payloads(file: RawFile, staging: Bytes) -> NixlPayloads:
        opened.append(NixlPayloads(file, staging))
        return opened[0]

    async with disk_tier(open_payloads, in_thread=True) as device:
        assert await device.tier.store([block(0, A), block(1, B)]) == 2
        monkeypatch.setattr(nixl_payloads, "_MAX_COPY_S", 0.01)
        agent, opened[0]._agent = opened[0]._agent, NeverEnds(opened[0]._agent)
        assert await device.tier.load([A], [5]) == 0
        opened[0]._agent = agent
        assert not device.tier.answers
        assert device.tier.store_pause_s == inf
        assert await device.tier.load([A, B], [5, 6]) == 0
        assert await device.tier.store([block(2, C)]) == 0
