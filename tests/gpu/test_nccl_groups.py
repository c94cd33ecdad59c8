"""KV over NCCL between two processes, each with a GPU. Not verified: no machine with two GPUs has run it.

python -m pytest tests/gpu/test_nccl_groups.py tests/contract/test_transfer_backend.py -m gpu
"""

import multiprocessing

import pytest
import torch

from tests.gpu.nccl_pair import run_owner, run_reader

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

PROCESS_S = 120.0


def test_blocks_and_entries_arrive_over_nccl() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("NCCL refuses two processes of one group on one GPU; two GPUs are needed")
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    processes = [
        context.Process(target=run_owner, args=(here, "cuda:0")),
        context.Process(target=run_reader, args=(there, "cuda:1")),
    ]
    for process in processes:
        process.start()
    try:
        for process in reversed(processes):
            process.join(PROCESS_S)
            assert process.exitcode == 0
    finally:
        for process in processes:
            process.kill()
            process.join()
