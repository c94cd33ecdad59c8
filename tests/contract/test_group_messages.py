"""Messages of process groups have no bytes that were not written for them."""

from collections.abc import Callable

import pytest
import torch

from baton.core.ids import ReadId
from baton.transfer.backends.collective.gpu_messages import GpuMessages
from baton.transfer.backends.collective.host_messages import HostMessages
from baton.transfer.backends.collective.message_format import (
    HEADER_BYTES,
    MessageFormat,
    MessageHeader,
    MessageMemory,
)
from baton.transfer.backends.host_memory import HostMemory, allocate_private
from baton.transfer.integrity.generation_table import ENTRY_BYTES
from tests import builders

pytestmark = [pytest.mark.contract, pytest.mark.model]

LAYOUT = builders.layout()
FORM = MessageFormat.of(LAYOUT)
NUM_BLOCKS = 8
OLD = 0xAB
"""Content of the buffer before a message is written into it."""

Make = Callable[[HostMemory], MessageMemory]


def _host(memory: HostMemory) -> MessageMemory:
    return HostMessages(LAYOUT, memory)


def _gpu(memory: HostMemory) -> MessageMemory:
    """Host memory takes the place of a GPU's."""
    return GpuMessages(LAYOUT, torch.from_numpy(memory.kv), memory.generation_table)


def packed(make: Make, num_blocks: int, block_ids: tuple[int, ...]) -> bytes:
    """Return the message for blocks full of ones, with entries full of twos."""
    memory = allocate_private(NUM_BLOCKS, LAYOUT.block_bytes)
    memory.kv[:], memory.generation_table[:] = 1, 2
    messages = make(memory)
    buffer = messages.new_buffer()
    buffer.fill_(OLD)
    header = MessageHeader(read_id=ReadId(5), num_blocks=num_blocks, granted=bool(block_ids))
    message = messages.pack(buffer, header, block_ids).numpy().tobytes()
    assert MessageHeader.decode(message) == header
    del messages
    memory.close()
    return message


@pytest.mark.parametrize("make", [_host, _gpu])
@pytest.mark.parametrize("num_blocks", [1, 2, 3])
def test_a_message_has_zeros_between_entries_and_blocks(make: Make, num_blocks: int) -> None:
    message = packed(make, num_blocks, tuple(range(num_blocks)))
    entries_end, begin = HEADER_BYTES + num_blocks * ENTRY_BYTES, FORM.blocks_at(num_blocks)
    assert len(message) == FORM.num_bytes(num_blocks)
    assert message[HEADER_BYTES:entries_end] == b"\2" * (num_blocks * ENTRY_BYTES)
    assert not any(message[entries_end:begin])
    assert message[begin:] == b"\1" * (num_blocks * LAYOUT.block_bytes)


@pytest.mark.parametrize("num_blocks", [1, 2, FORM.max_blocks])
def test_the_answer_to_a_refused_read_is_a_header_in_host_memory(num_blocks: int) -> None:
    assert len(packed(_host, num_blocks, ())) == HEADER_BYTES


@pytest.mark.parametrize("num_blocks", [1, 2, FORM.max_blocks])
def test_the_answer_to_a_refused_read_has_zeros_in_gpu_memory(num_blocks: int) -> None:
    message = packed(_gpu, num_blocks, ())
    assert len(message) == FORM.num_bytes(num_blocks)
    assert not any(message[HEADER_BYTES:])
