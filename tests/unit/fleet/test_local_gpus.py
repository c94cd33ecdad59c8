"""GPUs that workers of this machine may use."""

from pathlib import Path

import pytest

from baton.fleet.local.local_gpus import local_gpus


def tool(directory: Path, script: str) -> dict[str, str]:
    """An environment in which nvidia-smi is this shell script."""
    file = directory / "nvidia-smi"
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    return {"PATH": str(directory)}


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_all_listed_gpus_are_returned(device: str, tmp_path: Path) -> None:
    assert local_gpus(device, tool(tmp_path, "echo GPU-1; echo ' GPU-2 '; echo")) == ["GPU-1", "GPU-2"]


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_device_without_gpus_does_not_run_nvidia_smi(device: str, tmp_path: Path) -> None:
    assert (
        local_gpus(device, tool(tmp_path, f"touch {tmp_path}/was_run; echo GPU-1") | {"CUDA_VISIBLE_DEVICES": "0"})
        == []
    )
    assert not (tmp_path / "was_run").exists()


@pytest.mark.parametrize(("visible", "found"), [("2, 5", ["2", "5"]), ("MIG-a", ["MIG-a"]), ("", [])])
def test_cuda_visible_devices_takes_precedence(visible: str, found: list[str], tmp_path: Path) -> None:
    assert local_gpus("auto", tool(tmp_path, "echo GPU-1") | {"CUDA_VISIBLE_DEVICES": visible}) == found


def test_missing_or_failing_tool_lists_no_gpus(tmp_path: Path) -> None:
    assert local_gpus("auto", {"PATH": str(tmp_path)}) == []
    assert local_gpus("cuda", tool(tmp_path, "echo broken >&2; exit 9")) == []
