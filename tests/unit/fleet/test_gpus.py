"""Which GPUs workers of this machine may use."""

from pathlib import Path

import pytest

from baton.fleet.local.local_gpus import local_gpus


def tool(directory: Path, script: str) -> dict[str, str]:
    """An environment whose nvidia-smi does that."""
    file = directory / "nvidia-smi"
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    return {"PATH": str(directory)}


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_all_that_the_driver_lists(device: str, tmp_path: Path) -> None:
    assert local_gpus(device, tool(tmp_path, "echo GPU-1; echo ' GPU-2 '; echo")) == ["GPU-1", "GPU-2"]


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_where_none_is_used_nobody_is_asked(device: str, tmp_path: Path) -> None:
    assert (
        local_gpus(device, tool(tmp_path, f"touch {tmp_path}/asked; echo GPU-1") | {"CUDA_VISIBLE_DEVICES": "0"}) == []
    )
    assert not (tmp_path / "asked").exists()


@pytest.mark.parametrize(("shown", "found"), [("2, 5", ["2", "5"]), ("MIG-a", ["MIG-a"]), ("", [])])
def test_what_this_process_is_shown_goes_before(shown: str, found: list[str], tmp_path: Path) -> None:
    assert local_gpus("auto", tool(tmp_path, "echo GPU-1") | {"CUDA_VISIBLE_DEVICES": shown}) == found


def test_without_a_driver_there_are_none(tmp_path: Path) -> None:
    assert local_gpus("auto", {"PATH": str(tmp_path)}) == []
    assert local_gpus("cuda", tool(tmp_path, "echo broken >&2; exit 9")) == []
