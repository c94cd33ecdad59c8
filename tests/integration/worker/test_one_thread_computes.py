"""A worker computes in one thread only; a second computing thread would make OpenMP's threads sleep between
steps."""

import subprocess
import sys

import pytest

COUNT = """
import os, sys
from baton.core.kv.block_hash import token_ids
from baton.core.ids import WorkerRef
from baton.model.loading.model_source import DEMO_DIR
from baton.engine.state.step import StepPlan, StepSequence
from baton.runtime.config.settings import WorkerConfig
from baton.worker.device.open_device import open_device

config = WorkerConfig(model=str(DEMO_DIR), kv_memory=2**26, transfer="local", threads_per_worker=int(sys.argv[1]))
executor = open_device(config, WorkerRef(worker_id="w", worker_epoch=1, address="w")).executor
prompt = StepSequence(
    seq_id=0, token_ids=token_ids(range(300, 364)), position_begin=0, kv_begin=0, block_table=(0, 1, 2, 3), sample=None
)
executor._thread.submit(executor.run, StepPlan(step_id=0, sequences=(prompt,))).result()
print(len(os.listdir("/proc/self/task")), flush=True)
os._exit(0)
"""
OPENMPS, TORCHS = 1, 1
"""Threads that a second thread per step adds: one in OpenMP's team, and a sleeping one in torch's pool."""


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads as Linux shows them")
def test_steps_share_one_thread_pool() -> None:
    one, two = (
        int(
            subprocess.run(
                [sys.executable, "-c", COUNT, str(n)], capture_output=True, text=True, check=True, timeout=120
            ).stdout
        )
        for n in (1, 2)
    )
    assert two - one == OPENMPS + TORCHS
