"""Opens the device that the worker settings name: the real one, or the emulated one."""

from baton.core.ids import WorkerRef
from baton.runtime.config.settings import WorkerConfig
from baton.worker.device.emulated_device import open_emulated_device
from baton.worker.device.gpu_start import Say
from baton.worker.device.real_device import open_real_device
from baton.worker.device.worker_device import Device


def open_device(config: WorkerConfig, worker: WorkerRef, say: Say = lambda text: None) -> Device:
    """Load the model, allocate and register KV memory, and build engine and executor.

    say: told what takes long on a GPU, from any thread. Takes seconds to minutes and blocks the calling
    thread. Needs no event loop. Raises ModelError if the model cannot be loaded, ConfigError if a setting
    does not fit this machine, LayoutMismatch if memory and layout disagree.
    """
    if config.device == "emulated":
        return open_emulated_device(config, worker)
    return open_real_device(config, worker, say)
