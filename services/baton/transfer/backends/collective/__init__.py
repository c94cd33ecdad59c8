"""Two-sided transfer backend over process groups of `torch.distributed`: NCCL between GPUs, else Gloo."""
