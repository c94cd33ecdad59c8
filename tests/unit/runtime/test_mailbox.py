"""Mailbox: the bounded queue of one direction of a stream."""

import asyncio

import pytest

from baton.core.errors import StreamBroken
from baton.runtime.network.mailbox import Mailbox
from tests import builders


async def test_waiting_receiver_gets_the_next_message() -> None:
    box: Mailbox[int] = Mailbox(2)
    waiting = asyncio.create_task(box.get())
    await asyncio.sleep(0)
    box.put(1)
    assert await waiting == 1


async def test_wait_for_space_returns_when_a_message_is_taken() -> None:
    box: Mailbox[int] = Mailbox(2)
    box.put(1)
    await box.wait_for_space()
    box.put(2)
    assert box.is_full
    waiting = asyncio.create_task(box.wait_for_space())
    await asyncio.sleep(0)
    assert not waiting.done()
    assert await box.get() == 1
    await waiting
    assert not box.is_full


async def test_mailbox_is_full_when_its_messages_have_enough_bytes() -> None:
    box: Mailbox[int] = Mailbox(10, max_bytes=100)
    box.put(1, 60)
    assert not box.is_full
    box.put(2, 60)
    assert box.is_full
    waiting = asyncio.create_task(box.wait_for_space())
    await asyncio.sleep(0)
    assert (await box.get(), box.num_bytes) == (1, 60)
    await waiting
    box.put(3, 500)
    box.close("over", discard=True)
    assert box.num_bytes == 0


async def test_close_wakes_sender_and_receiver_and_keeps_queued_messages() -> None:
    box: Mailbox[int] = Mailbox(1)
    box.put(1)
    waiting = asyncio.create_task(box.wait_for_space())
    await asyncio.sleep(0)
    box.close("over", failure := builders.failure())
    await waiting
    box.put(2)
    assert await box.get() == 1
    with pytest.raises(StreamBroken, match="over") as broken:
        await box.get()
    assert broken.value.failure == failure


async def test_second_close_keeps_the_first_reason_and_can_discard_messages() -> None:
    box: Mailbox[int] = Mailbox(5)
    box.put(1)
    box.close("first")
    box.close("second", discard=True)
    with pytest.raises(StreamBroken, match="first"):
        await box.get()


async def test_cancelled_get_removes_no_message() -> None:
    box: Mailbox[int] = Mailbox(5)
    waiting = asyncio.create_task(box.get())
    await asyncio.sleep(0)
    box.put(1)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert await box.get() == 1


def test_capacity_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="max_messages is 0; must be at least 1"):
        Mailbox(0)
