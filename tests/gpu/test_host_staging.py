"""KV of a GPU through host memory."""

import pytest
import torch

from baton.model.device.host_staging import HostStaging
from baton.model.device.kv_tensors import KvCache
from baton.transfer.backends.host_memory import allocate_shared
from tests import builders

pytestmark = pytest.mark.gpu
NUM_BLOCKS = 12


def test_copies_both_ways_through_pinned_memory() -> None:
    layout = builders.layout()
    cache = KvCache.zeros(layout, NUM_BLOCKS, "cuda")
    there = cache.blocks.view(NUM_BLOCKS, -1).view(torch.uint8)
    there.random_(0, 256)
    memory = allocate_shared(NUM_BLOCKS, layout.block_bytes)
    host = torch.from_numpy(memory.kv)
    mirror = HostStaging(cache, memory.kv)
    assert host.is_pinned()

    out = [1, 2, 3, 7]
    mirror.to_host(out)
    assert torch.equal(host[out], there[out].cpu())
    assert not host[[0, 4, 11]].any()

    host.fill_(9)
    before = there.cpu()
    mirror.to_device([0, 11])
    assert (there[[0, 11]] == 9).all()
    assert torch.equal(there[1:11].cpu(), before[1:11])

    mirror.close()
    assert not host.is_pinned()
    memory.close()
