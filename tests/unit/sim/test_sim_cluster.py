"""A paused process that is killed does nothing more that others can see."""

import asyncio

import pytest

from baton.sim import virtual_time
from baton.sim.sim_clients import SimRequest, run_client
from baton.sim.sim_cluster import SimCluster
from baton.sim.virtual_time import VirtualTimeLoop, running_loop
from tests.sim.storm_cluster import MODEL, config


def test_paused_process_that_is_killed_is_cut_off_before_it_runs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its callbacks were held by the pause. They run only to be cleaned up."""

    async def main() -> None:
        cluster = SimCluster(config(), MODEL, 0)
        await cluster.start()
        await asyncio.sleep(1.0)
        name = "decode-0"
        work = asyncio.create_task(
            run_client(SimRequest(number=0, start_s=0.0, prompt=tuple(range(1, 60)), max_tokens=20), cluster.gateway)
        )
        await asyncio.sleep(0.03)
        cluster.pause(name, reads_stop=True)
        await asyncio.sleep(0.03)
        streams_at_resume: list[int] = []

        def resume(loop: VirtualTimeLoop, process: str) -> None:
            streams_at_resume.append(sum(name in stream.processes for stream in cluster.network.streams.values()))
            resumed(loop, process)

        resumed = VirtualTimeLoop.resume
        monkeypatch.setattr(VirtualTimeLoop, "resume", resume)
        await cluster.kill(name)
        assert streams_at_resume == [0]
        assert not running_loop().is_paused(name)
        answer = await work
        assert answer.outcome == "finished"
        answer.check(MODEL.vocab_size)
        await cluster.aclose()

    virtual_time.run(main())
