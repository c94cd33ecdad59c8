"""The thread that computes, for those who must not name torch."""

from concurrent.futures import ThreadPoolExecutor

import torch


def compute_thread(num_threads: int) -> ThreadPoolExecutor:
    """One thread, with `num_threads` of its own. All that a process computes belongs there: loading a model, proving it, its steps.

    GNU's OpenMP keeps a team for every thread that has ever computed in parallel. Once their threads are more than the cores, none waits
    awake for the next product any more, and waking them took a third of a decode step (42M parameters, 2 cores, 2026-11-22).
    """
    return ThreadPoolExecutor(1, "baton-step", initializer=torch.set_num_threads, initargs=(num_threads,))
