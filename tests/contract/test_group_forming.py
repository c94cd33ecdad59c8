"""How process groups of Gloo form: secrets, one time limit, and what is left of those that do not form."""

import asyncio
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
import torch

from baton.core.messages.peer_messages import GroupMessage
from baton.transfer.backend import ReadState
from baton.transfer.backends.collective import collective_backend, group_server
from baton.transfer.backends.collective.gloo_group import GlooGroup, gloo_device
from baton.transfer.backends.collective.group_secrets import SECRET_BYTES, GroupSecrets, secret_key
from baton.transfer.backends.collective.process_group import OWNER_RANK, READER_RANK, GroupFailed
from baton.transfer.backends.collective.rendezvous_store import RendezvousStore
from tests.contract.test_process_groups import connected, until_no_more_than, usage
from tests.contract.transfer_backends import LAYOUT

pytestmark = [pytest.mark.contract, pytest.mark.model, pytest.mark.timeout(120)]

HOST = "127.0.0.1"
_ADDRESS = struct.pack("=H", socket.AF_INET)
SLACK_S = 0.5


def address_key(rank: int) -> str:
    return f"0/{rank}"


def port_at(published: bytes) -> int:
    """Return where the port is in an address that Gloo has published."""
    address = published.index(socket.inet_aton(HOST))
    assert published[address - 4 : address - 2] == _ADDRESS
    return address - 2


class Forming:
    """A group that forms on a thread. The test plays the other process."""

    def __init__(self, rank: int, timeout_s: float, publish: Callable[[str, bytes], None] | None = None) -> None:
        self.published: dict[str, bytes] = {}
        self.store = RendezvousStore(publish or self.published.__setitem__, timeout_s)
        self.group = GlooGroup(self.store, rank, HOST)
        self.took_s = 0.0
        self.problem = ""
        self._thread = threading.Thread(target=self._join, daemon=True)
        self._thread.start()

    def value(self, key: str) -> bytes:
        """Return a value that the group has published, once it has."""
        ends_s = time.monotonic() + 10
        while key not in self.published and time.monotonic() < ends_s:
            time.sleep(0.005)
        return self.published[key]

    def wait_ended(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()

    def _join(self) -> None:
        begin_s = time.monotonic()
        try:
            self.group.join()
        except GroupFailed as error:
            self.problem = str(error)
        finally:
            self.group.close()
            self.took_s = time.monotonic() - begin_s


def silent_peer(timeout_s: float) -> tuple[Forming, int]:
    """Form a reader's group whose owner publishes an address and never connects. Returns its port, too."""
    forming = Forming(READER_RANK, timeout_s)
    forming.store.deliver(secret_key(OWNER_RANK), bytes(SECRET_BYTES))
    address = forming.value(address_key(READER_RANK))
    at = port_at(address)
    beyond = address[:at] + struct.pack(">H", 65535) + address[at + 2 :]  # the higher port is the one that connects
    forming.store.deliver(address_key(OWNER_RANK), beyond)
    return forming, struct.unpack(">H", address[at : at + 2])[0]


def test_a_group_whose_peer_never_connects_fails_within_the_time_limit() -> None:
    forming, _port = silent_peer(2.0)
    forming.wait_ended()
    assert "Connect timeout" in forming.problem
    assert forming.took_s < 2.0 + SLACK_S


def test_a_connection_that_comes_after_the_time_limit_is_refused() -> None:
    """With a device that outlives the group, Gloo would now use memory that is freed."""
    forming, port = silent_peer(0.6)
    forming.wait_ended()
    for number in range(4):
        with suppress(ConnectionRefusedError), socket.create_connection((HOST, port), timeout=5) as late:
            late.sendall(struct.pack("=q", number))
            pytest.fail("the listening socket of a group that failed is still open")


def test_values_that_come_late_one_by_one_share_the_time_limit() -> None:
    forming = Forming(OWNER_RANK, 1.0)
    threading.Timer(0.4, forming.store.deliver, (secret_key(READER_RANK), bytes(SECRET_BYTES))).start()
    forming.wait_ended()
    assert "'0/0'" in forming.problem
    assert forming.took_s < 0.5 + SLACK_S


def test_a_group_that_is_left_while_it_waits_for_values_ends_at_once() -> None:
    forming = Forming(OWNER_RANK, 60.0)
    forming.value(secret_key(OWNER_RANK))
    forming.group.abort()
    forming.wait_ended()
    assert forming.took_s < SLACK_S


def test_a_group_that_is_left_while_it_connects_ends_by_the_time_limit_and_blocks_no_other() -> None:
    forming, _port = silent_peer(2.0)
    time.sleep(0.1)
    begin_s = time.monotonic()
    forming.group.abort()
    assert time.monotonic() - begin_s < SLACK_S
    forming.wait_ended()
    assert forming.took_s < 2.0 + SLACK_S


class Stranger:
    """A process group of somebody who reaches the port of a group, but does not know its secrets."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.victim = Forming(1 - rank, 4.0, self._publish)
        self._store = RendezvousStore(self.victim.store.deliver, 4.0)
        self.victim.store.deliver(secret_key(rank), bytes(SECRET_BYTES))

    def connect(self) -> Any:
        options: Any = torch.distributed.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [gloo_device(HOST)]
        options._timeout = timedelta(seconds=1)
        options._threads = 1
        return torch.distributed.ProcessGroupGloo(self._store, self.rank, 2, options)

    def _publish(self, key: str, value: bytes) -> None:
        if key.startswith("0/"):  # the port can be scanned, the secret cannot
            while not hasattr(self, "_store"):
                time.sleep(0.001)
            self._store.deliver(key, value)


def test_a_stranger_that_takes_the_readers_place_gets_nothing() -> None:
    stranger = Stranger(READER_RANK)
    group = stranger.connect()
    received = torch.zeros(SECRET_BYTES, dtype=torch.uint8)
    guess = group.send([torch.ones(SECRET_BYTES, dtype=torch.uint8)], OWNER_RANK, 1)
    guess.wait(timedelta(seconds=3))
    with pytest.raises(RuntimeError):
        group.recv([received], OWNER_RANK, 1).wait(timedelta(seconds=3))
    assert not received.any()
    stranger.victim.wait_ended()
    assert "does not know this group's secret" in stranger.victim.problem


def test_a_stranger_that_takes_the_owners_place_is_noticed() -> None:
    stranger = Stranger(OWNER_RANK)
    group = stranger.connect()
    group.recv([torch.zeros(SECRET_BYTES, dtype=torch.uint8)], READER_RANK, 1).wait(timedelta(seconds=3))
    guess = group.send([torch.ones(SECRET_BYTES, dtype=torch.uint8)], READER_RANK, 1)
    guess.wait(timedelta(seconds=3))
    stranger.victim.wait_ended()
    assert "does not know this group's secret" in stranger.victim.problem


@pytest.mark.parametrize("rank", [READER_RANK, OWNER_RANK])
async def test_a_wrong_secret_ends_the_group_and_the_next_one_works(rank: int) -> None:
    async with connected(silence_s=5) as pair:
        pair.reader.backend.forget(pair.memory)
        deliver, wrong = pair.server.receive, [rank]

        def tamper(message: GroupMessage) -> GroupMessage:
            if wrong and message.key == secret_key(wrong[0]):
                wrong.clear()
                return GroupMessage(group=message.group, key=message.key, value=bytes(SECRET_BYTES))
            return message

        def send(message: GroupMessage) -> None:
            asyncio.get_running_loop().call_soon(deliver, tamper(message))

        def answer(message: GroupMessage) -> None:
            asyncio.get_running_loop().call_soon(pair.reader.backend.receive, pair.memory, tamper(message))

        pair.server = pair.owner.backend.serve(pair.reader.worker, answer)
        deliver = pair.server.receive
        pair.reader.backend.connect(pair.memory, LAYOUT, send)
        assert await pair.read({0: 0}) in (ReadState.FAILED, ReadState.LOST)
        assert pair.reader.holds(0, 900)
        assert await pair.read({1: 1}) is ReadState.DONE
        assert pair.reader.holds(1, 1)


async def test_groups_that_are_left_before_the_owners_address_arrives_leak_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The owner connects to a reader that has left, or waits for its connection."""
    monkeypatch.setattr(collective_backend, "RENDEZVOUS_S", 2.0)
    monkeypatch.setattr(group_server, "MAX_ENDING_GROUPS", 20)
    async with connected(silence_s=5) as pair:
        assert await pair.read({0: 0}) is ReadState.DONE
        pair.reader.backend.forget(pair.memory)
        arrived = asyncio.Event()

        def answer(message: GroupMessage) -> None:
            if message.key == address_key(OWNER_RANK):
                asyncio.get_running_loop().call_later(0.05, arrived.set)  # meanwhile the owner connects
            else:
                asyncio.get_running_loop().call_soon(pair.reader.backend.receive, pair.memory, message)

        pair.server.close()
        pair.server = pair.owner.backend.serve(pair.reader.worker, answer)
        await asyncio.sleep(0.2)
        before = usage()
        for _ in range(20):
            arrived.clear()
            pair.reader.backend.connect(pair.memory, LAYOUT, pair.send)
            await asyncio.wait_for(arrived.wait(), 10)
            pair.reader.backend.forget(pair.memory)
        await until_no_more_than(before)


def test_only_the_whole_secret_is_accepted() -> None:
    known = GroupSecrets(own=b"o" * SECRET_BYTES, other=b"p" * SECRET_BYTES)
    assert known.is_from_peer(b"o" * SECRET_BYTES)
    assert not any(known.is_from_peer(each) for each in (b"", known.own[:-1], known.other, bytes(SECRET_BYTES)))
