"""Makes the stores refuse, hang, run full, lose calls, or lose all data."""

import asyncio
from random import Random

from baton.sim.chaos.faults.storm_context import StormContext
from baton.sim.chaos.report import Downtime
from baton.sim.sim_stores import StoreFault
from baton.sim.virtual_time import running_loop

FAULTS = [fault for fault in StoreFault if fault is not StoreFault.NONE]


async def break_stores(storm: StormContext, rng: Random) -> None:
    """Break and flush the stores at random times until the storm ends, one fault at a time."""
    stores = storm.cluster.stores
    while await storm.next_fault(rng, storm.profile.store_faults_per_s):
        is_flushed = rng.random() < 0.4
        fault = rng.choice([*FAULTS, StoreFault.NONE])
        duration_s = rng.uniform(*storm.profile.store_fault_s)
        if is_flushed or fault is StoreFault.NONE:
            storm.report.record_fault("store-flush", "all data")
            stores.flush()
        if fault is not StoreFault.NONE:
            storm.report.record_fault(f"store-{fault.value}", f"for {duration_s:.3f} s")
            stores.fault = fault
            outage = Downtime(process="stores", start_s=running_loop().now_s)
            storm.report.store_outages.append(outage)
            await asyncio.sleep(duration_s)
            stores.fault = StoreFault.NONE
            outage.end_s = running_loop().now_s
            storm.report.note("store works again")
