"""A worker computes in one thread. A second one would make the OpenMP threads sleep between steps."""

import subprocess
import sys

import pytest

COUNT_THREADS = """
import os, sys, threading, time
from baton.core.kv.block_hash import token_ids
from baton.core.ids import WorkerRef
from baton.model.loading.model_source import DEMO_DIR
from baton.engine.state.step import StepPlan, StepSequence
from baton.runtime.config.settings import WorkerConfig
from baton.transfer.backends.prefault import PREFAULT_THREAD_NAME
from baton.worker.device.open_device import open_device

started, start = [], threading.Thread.start
threading.Thread.start = lambda thread: (started.append(thread), start(thread))  # records threads that end at once, too

config = WorkerConfig(model=str(DEMO_DIR), kv_memory=2**26, transfer="local", threads_per_worker=int(sys.argv[1]))
executor = open_device(config, WorkerRef(worker_id="w", worker_epoch=1, address="w")).executor
prompt = StepSequence(
    seq_id=0, token_ids=token_ids(range(300, 364)), position_begin=0, kv_begin=0, block_table=(0, 1, 2, 3), sample=None
)
executor._thread.submit(executor.run, StepPlan(step_id=0, sequences=(prompt,))).result()
for thread in started:
    if thread.name == PREFAULT_THREAD_NAME:  # it ends when all memory is allocated
        thread.join()
        while os.path.exists(f"/proc/self/task/{thread.native_id}"):  # the system removes it a little later
            time.sleep(0.001)
print(len(os.listdir("/proc/self/task")), flush=True)
os._exit(0)
"""
OPENMP_THREADS, TORCH_THREADS = 1, 1
"""Threads that `threads_per_worker=2` adds: one in the OpenMP team and a sleeping one in torch's pool."""


@pytest.mark.long  # each of the two processes loads a model
@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_second_thread_per_worker_adds_one_openmp_and_one_torch_thread() -> None:
    one, two = (
        int(
            subprocess.run(
                [sys.executable, "-c", COUNT_THREADS, str(n)], capture_output=True, text=True, check=True, timeout=120
            ).stdout
        )
        for n in (1, 2)
    )
    assert two - one == OPENMP_THREADS + TORCH_THREADS
