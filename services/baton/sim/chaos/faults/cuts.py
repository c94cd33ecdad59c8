"""Cuts streams, if possible while messages are under way."""

import asyncio
from random import Random

from baton.sim.chaos.faults.storm_context import StormContext

BUSY_POLL_S, BUSY_POLLS = 0.0002, 100
"""Interval and number of checks for messages under way before a stream is cut. Most streams are idle
mostly."""


async def cut_streams(storm: StormContext, rng: Random) -> None:
    """Cut random streams until the storm ends."""
    while await storm.next_fault(rng, storm.profile.cuts_per_s):
        streams = list(storm.cluster.network.streams.values())
        if streams:
            stream = rng.choice(streams)
            for _ in range(BUSY_POLLS):  # wait for a message that the cut can lose
                if stream.num_under_way:
                    break
                await asyncio.sleep(BUSY_POLL_S)
            storm.report.record_fault("cut", "-".join(stream.hosts))
            stream.cut()
