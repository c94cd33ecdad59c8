"""Provides the thread that does all computing of a process, for callers that must not import torch."""

import sys
from concurrent.futures import ThreadPoolExecutor

import torch

from baton.runtime.process.process import set_default_scheduling

SWITCH_INTERVAL_S = 0.0002
"""The interpreter's switch interval. The compute thread needs the GIL between any two kernels, and the event
loop may hold it. Python's default of 5 ms is longer than many steps. With 0.2 ms, time per token over HTTP
was 9 % shorter (median of 12 pairs, the demo model on 2 cores, 2026-11-22)."""


def compute_thread(num_threads: int) -> ThreadPoolExecutor:
    """Return a pool of one thread that computes with `num_threads` OpenMP threads.

    Everything that a process computes must run there: loading a model, verifying it, its steps. Sets the
    switch interval of the whole process.

    GNU OpenMP keeps a thread pool for every thread that ever computed in parallel. If these have more threads
    than there are cores, they sleep between products instead of spinning. Waking them took a third of a
    decode step (42M parameters, 2 cores, 2026-11-22).
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    return ThreadPoolExecutor(1, "baton-step", initializer=_begin, initargs=(num_threads,))


def _begin(num_threads: int) -> None:
    set_default_scheduling()  # first, because OpenMP threads inherit the scheduling of this thread
    torch.set_num_threads(num_threads)
