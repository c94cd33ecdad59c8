"""Tests copies of KV blocks between a GPU and host memory."""

import pytest
import torch

from baton.model.device.host_staging import HostStaging
from baton.model.device.kv_tensors import KvCache
from baton.transfer.backends.host_memory import allocate_shared
from tests import builders

pytestmark = pytest.mark.gpu
NUM_BLOCKS = 12


def test_copies_to_and_from_the_host_through_pinned_memory() -> None:
    layout = builders.layout()
    cache = KvCache.zeros(layout, NUM_BLOCKS, "cuda")
    device_blocks = cache.memory
    device_blocks.random_(0, 256)
    memory = allocate_shared(NUM_BLOCKS, layout.block_bytes)
    host = torch.from_numpy(memory.kv)
    staging = HostStaging(cache, memory.kv)
    assert host.is_pinned()

    out = [1, 2, 3, 7]
    staging.to_host(out)
    assert torch.equal(host[out], device_blocks[out].cpu())
    assert not host[[0, 4, 11]].any()

    host.fill_(9)
    before = device_blocks.cpu()
    staging.to_device([0, 11])
    assert (device_blocks[[0, 11]] == 9).all()
    assert torch.equal(device_blocks[1:11].cpu(), before[1:11])

    staging.close()
    assert not host.is_pinned()
    memory.close()
