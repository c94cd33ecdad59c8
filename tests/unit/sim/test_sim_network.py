"""Partitions and pauses in the simulated network: nothing passes, streams break, dials time out."""

import asyncio
from random import Random
from typing import Any

import pytest

from baton.core.errors import StreamBroken
from baton.sim import virtual_time
from baton.sim.sim_network import DIAL_S, Delays, SimNetwork

KEEPALIVE_S = 0.9


class EchoWorker:
    """A worker service that sends back what it receives."""

    async def session(self, stream: Any) -> None:
        while True:
            stream.send(await stream.receive())


async def opened() -> tuple[SimNetwork, Any]:
    """Return a network, and a stream from `gateway:1` to the echo service at `worker:1`."""
    network = SimNetwork(Random(0), Delays(), keepalive_s=KEEPALIVE_S)
    network.listen("worker:1", EchoWorker())  # type: ignore[arg-type]
    return network, await network.host("gateway:1").open_session("worker:1")


@pytest.mark.parametrize("is_under_way", [False, True])
def test_messages_wait_until_a_short_partition_is_healed(is_under_way: bool) -> None:
    """Also one that was sent before the partition began."""

    async def main() -> None:
        network, stream = await opened()
        if is_under_way:
            stream.send("a")
            await asyncio.sleep(0)
        network.partition("gateway", "worker")
        if not is_under_way:
            stream.send("a")
        stream.send("b")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(KEEPALIVE_S / 2):
                await stream.receive()
        network.heal("gateway", "worker")
        assert [await stream.receive(), await stream.receive()] == ["a", "b"]
        await network.kill("worker:1")

    virtual_time.run(main())


def test_message_that_reached_its_process_before_a_partition_is_read_during_it() -> None:
    async def main() -> None:
        network, stream = await opened()
        stream.send("a")
        await asyncio.sleep(KEEPALIVE_S / 2)
        network.partition("gateway", "worker")
        assert await stream.receive() == "a"
        network.heal("gateway", "worker")
        await network.kill("worker:1")

    virtual_time.run(main())


@pytest.mark.parametrize("heals", [False, True])
def test_death_beyond_a_partition_is_noticed_by_keepalive_or_after_it(heals: bool) -> None:
    async def main() -> None:
        network, stream = await opened()
        network.partition("gateway", "worker")
        await network.kill("worker:1")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(KEEPALIVE_S / 2):
                await stream.receive()
        if heals:
            network.heal("gateway", "worker")
        with pytest.raises(StreamBroken, match="the process died" if heals else "keepalive"):
            await stream.receive()
        assert asyncio.get_running_loop().time() < KEEPALIVE_S * (0.6 if heals else 1.1)
        assert not network.streams

    virtual_time.run(main())


def test_long_partition_breaks_streams_and_dials() -> None:
    async def main() -> None:
        network, stream = await opened()
        loop = asyncio.get_running_loop()
        network.partition("gateway", "worker")
        started_s = loop.time()
        with pytest.raises(StreamBroken, match="keepalive"):
            await stream.receive()
        assert loop.time() - started_s == pytest.approx(KEEPALIVE_S, abs=0.01)
        started_s = loop.time()
        with pytest.raises(StreamBroken, match="did not answer"):
            await network.host("gateway:1").open_session("worker:1")
        assert loop.time() - started_s == pytest.approx(DIAL_S, abs=0.01)
        other = await network.host("other:1").open_session("worker:1")
        other.send("not affected")
        assert await other.receive() == "not affected"
        await network.kill("worker:1")

    virtual_time.run(main())


def test_paused_process_loses_its_streams_after_keepalive() -> None:
    async def main() -> None:
        network, stream = await opened()
        network.paused("worker")
        await asyncio.sleep(KEEPALIVE_S / 2)
        network.resumed("worker")
        await asyncio.sleep(KEEPALIVE_S)
        stream.send("survived")
        assert await stream.receive() == "survived"
        network.paused("worker")
        with pytest.raises(StreamBroken, match="keepalive"):
            await stream.receive()
        await network.kill("worker:1")

    virtual_time.run(main())


def test_dead_process_opens_no_stream_while_it_is_cleaned_up() -> None:
    async def main() -> None:
        network, _ = await opened()
        gateway = network.host("gateway:1")
        dial = asyncio.create_task(gateway.open_session("worker:1"))
        await asyncio.sleep(0)
        await network.kill("gateway:1")
        with pytest.raises(StreamBroken, match="gateway:1 is dead"):
            await dial
        assert not network.streams
        await network.host("gateway:1").open_session("worker:1")
        await network.kill("worker:1")

    virtual_time.run(main())


def test_late_messages_are_overtaken_by_other_streams_only() -> None:
    async def main() -> None:
        network = SimNetwork(Random(1), Delays(late=0.5, late_s=0.2))
        network.listen("worker:1", EchoWorker())  # type: ignore[arg-type]
        streams = [await network.host("gateway:1").open_session("worker:1") for _ in range(20)]
        for number, stream in enumerate(streams):
            for message in range(3):
                stream.send((number, message))
        arrived: list[Any] = []

        async def collect(stream: Any) -> None:
            for _ in range(3):
                arrived.append(await stream.receive())  # noqa: PERF401 - all streams append to one list

        await asyncio.gather(*map(collect, streams))
        assert [number for number, _ in arrived] != sorted(number for number, _ in arrived)
        for number in range(20):
            assert [m for n, m in arrived if n == number] == [0, 1, 2]
        await network.kill("worker:1")

    virtual_time.run(main())
