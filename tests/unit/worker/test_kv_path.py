"""Whether peers read a GPU's KV directly or from a copy in host memory."""

import json
from pathlib import Path
from typing import NoReturn

import pytest

from baton.fleet.doctor.doctor_check import CheckStatus
from baton.fleet.doctor.doctor_gpu import allocator_findings, kv_path_finding
from baton.runtime.child import process_pair
from baton.runtime.child.verdict_cache import VerdictCache
from baton.worker.device.kv_memory import kv_path
from baton.worker.device.kv_memory.kv_path import (
    MEASURING,
    KvPath,
    PathSpeed,
    choose_kv_path,
    kv_path_for,
    measure_path,
    peer_gpu,
)

TCP, STAGED, IPC = (
    PathSpeed(bytes_per_s=0.3e9, transport="tcp"),
    PathSpeed(bytes_per_s=2.8e9, transport="cma"),
    PathSpeed(bytes_per_s=40e9, transport="cuda_ipc"),
)
BROKEN = PathSpeed(problem="no such device")
FACTS = {"gpu": "H100"}


def no_measurement(path: KvPath) -> NoReturn:
    raise AssertionError(path)


@pytest.mark.parametrize(
    ("direct", "staged", "path"),
    [
        (IPC, STAGED, KvPath.DIRECT),
        (TCP, STAGED, KvPath.STAGED),
        (STAGED, STAGED, KvPath.DIRECT),
        (BROKEN, STAGED, KvPath.STAGED),
        (TCP, BROKEN, KvPath.DIRECT),
        (BROKEN, BROKEN, KvPath.DIRECT),
    ],
)
def test_the_faster_path_is_chosen(direct: PathSpeed, staged: PathSpeed, path: KvPath) -> None:
    choice = choose_kv_path(direct, staged)
    assert choice.path is path
    assert choice.reason == f"direct {direct.text}; staged {staged.text}"


def test_the_reason_names_speeds_and_problems() -> None:
    assert choose_kv_path(TCP, STAGED).reason == "direct 0.3 GB/s over tcp; staged 2.8 GB/s over cma"
    assert "direct failed: no such device" in choose_kv_path(BROKEN, STAGED).reason


def test_a_setting_is_not_measured(tmp_path: Path) -> None:
    for path in KvPath:
        found = kv_path_for(path.value, cache=VerdictCache(tmp_path), measure=no_measurement, facts={})
        assert (found.path, found.reason) == (path, f"--gpu-kv {path.value}")


def test_speeds_are_measured_once(tmp_path: Path) -> None:
    measured = []

    def measure(path: KvPath) -> PathSpeed:
        measured.append(path)
        return {KvPath.DIRECT: TCP, KvPath.STAGED: STAGED}[path]

    said: list[str] = []
    found = [
        kv_path_for("auto", cache=VerdictCache(tmp_path), measure=measure, facts=FACTS, say=said.append)
        for _ in range(2)
    ]
    assert said == [MEASURING], "a kept speed is nothing to wait for"
    assert measured == [KvPath.DIRECT, KvPath.STAGED]
    assert found[0] == found[1] == choose_kv_path(TCP, STAGED)
    assert kv_path_for("auto", cache=VerdictCache(tmp_path), measure=measure, facts={"gpu": "H200"}).reason
    assert len(measured) == 4


def test_a_failed_measurement_is_repeated_at_the_next_start(tmp_path: Path) -> None:
    speeds = {KvPath.DIRECT: BROKEN, KvPath.STAGED: STAGED}
    assert kv_path_for("auto", cache=VerdictCache(tmp_path), measure=speeds.__getitem__, facts=FACTS).path is (
        KvPath.STAGED
    )
    speeds[KvPath.DIRECT] = IPC
    assert kv_path_for("auto", cache=VerdictCache(tmp_path), measure=speeds.__getitem__, facts=FACTS).path is (
        KvPath.DIRECT
    )


@pytest.mark.parametrize("kept", [{}, {"direct": 3}, {"direct": [1.0, "tcp"], "staged": ["fast", "cma"]}])
def test_damaged_speeds_are_measured_again(tmp_path: Path, kept: dict[str, object]) -> None:
    VerdictCache(tmp_path).keep(FACTS, kept)
    found = kv_path_for("auto", cache=VerdictCache(tmp_path), measure=lambda path: IPC, facts=FACTS)
    assert found.path is KvPath.DIRECT


def test_another_gpu_of_the_machine_is_the_peer() -> None:
    assert peer_gpu("GPU-a", ["GPU-a", "GPU-b", "GPU-c"]) == "GPU-b"
    assert peer_gpu("GPU-b", ["GPU-a", "GPU-b"]) == "GPU-a"
    assert peer_gpu("GPU-a", ["GPU-a"]) is None
    assert peer_gpu("GPU-a", []) is None


@pytest.mark.parametrize("answer", ["", "[]", "text", json.dumps({"transport": "tcp"})])
def test_a_wrong_answer_is_a_problem(monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    monkeypatch.setattr(kv_path, "run_pair", lambda *_arguments: f"noise\n{answer}\n")
    assert measure_path(KvPath.DIRECT, "cpu").problem


def test_a_failed_process_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_arguments: object) -> str:
        raise process_pair.ProcessPairFailed("the GPU fell off the bus")

    monkeypatch.setattr(kv_path, "run_pair", fail)
    assert measure_path(KvPath.STAGED, "cpu") == PathSpeed(problem="the GPU fell off the bus")


@pytest.mark.integration
@pytest.mark.parametrize("path", [pytest.param(KvPath.DIRECT, marks=pytest.mark.long), KvPath.STAGED])
def test_both_paths_are_measured_without_a_gpu(path: KvPath) -> None:
    """Real NIXL between two processes, over host memory; the bytes are compared."""
    found = measure_path(path, "cpu")
    assert not found.problem
    assert found.bytes_per_s > 0


def test_doctor_says_which_path_workers_use() -> None:
    assert kv_path_finding(IPC, STAGED).verdict is CheckStatus.OK
    assert kv_path_finding(TCP, STAGED).verdict is CheckStatus.WARN
    assert "stage KV" in kv_path_finding(TCP, STAGED).advice
    assert "--transfer local" in kv_path_finding(BROKEN, BROKEN).advice


def test_doctor_fails_for_expandable_segments() -> None:
    assert not list(allocator_findings({}))
    (found,) = allocator_findings({"PYTORCH_ALLOC_CONF": "expandable_segments:True"})
    assert found.verdict is CheckStatus.FAIL
