"""Compute threads of this process, for those who must not name torch."""

import torch


def set_num_threads(num_threads: int) -> None:
    """For what is computed outside an executor's thread, such as loading a model and proving it."""
    torch.set_num_threads(num_threads)
