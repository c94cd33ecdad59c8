"""What a device is called: two of one name are equally fast."""

import platform
from contextlib import suppress

import torch


def device_name(device: torch.device) -> str:
    """Of the card, or of the processor where the system tells it."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return f"{platform.machine()} {platform.processor()}"
