"""The thread that computes, for those who must not name torch."""

import sys
from concurrent.futures import ThreadPoolExecutor

import torch

from baton.runtime.process.process import set_default_scheduling

SWITCH_S = 0.0002
"""So soon the thread gets the interpreter back from the event loop, which it needs between any two products.
Python's own 5 ms are more than many steps take: with 0.2 ms, the time per token over HTTP was 9 % shorter
(median of 12 pairs, the demo model on 2 cores, 2026-11-22)."""


def compute_thread(num_threads: int) -> ThreadPoolExecutor:
    """One thread, with `num_threads` of its own. All that a process computes belongs there: loading a model,
    proving it, its steps. The whole process hands its interpreter over after SWITCH_S from now on.

    GNU's OpenMP keeps a team for every thread that has ever computed in parallel. Once their threads are more
    than the cores, none waits awake for the next product any more, and waking them took a third of a decode
    step (42M parameters, 2 cores, 2026-11-22).
    """
    sys.setswitchinterval(SWITCH_S)
    return ThreadPoolExecutor(1, "baton-step", initializer=_begin, initargs=(num_threads,))


def _begin(num_threads: int) -> None:
    set_default_scheduling()  # before there is a team: its threads are as this one
    torch.set_num_threads(num_threads)
