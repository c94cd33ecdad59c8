"""Says whether a worker runs on a GPU, and what follows from that before its model is loaded."""

from baton.runtime.config.settings import WorkerConfig


def uses_gpu(config: WorkerConfig) -> bool:
    """Return True if the model of this worker runs on a GPU."""
    if config.device in ("cpu", "emulated"):
        return False
    from baton.model.device.device_info import has_gpu

    return has_gpu()


def step_tokens_of(config: WorkerConfig) -> int:
    """Return the token budget of one step of this worker."""
    return config.step_tokens(on_gpu=config.max_num_batched_tokens is None and uses_gpu(config))
