"""Each check as a function of what it sees, and all of them on the machine that runs the tests."""

import os
import resource
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.core.errors import ConfigError
from baton.fleet.doctor import doctor_links, doctor_software, findings
from baton.fleet.doctor.doctor_check import CheckStatus, Finding, fail, ok, warn
from baton.fleet.doctor.doctor_links import Measured, cma_finding, transfer_findings
from baton.fleet.doctor.doctor_machine import (
    cores_finding,
    cpu_finding,
    gpu_finding,
    memory_finding,
    open_files_finding,
    shm_finding,
)
from baton.fleet.doctor.doctor_software import directory_finding, ports, python_finding, pytorch_finding
from baton.store.redis import private_redis

GIB = 2**30
OK, WARN, FAIL = CheckStatus.OK, CheckStatus.WARN, CheckStatus.FAIL
FAST = Measured(transport="cma", bytes_per_s=5.2e9)
BROKEN = Measured(problem="no such device")


@pytest.mark.parametrize(
    ("finding", "verdict", "words"),
    [
        (python_finding((3, 12, 1)), OK, "3.12.1"),
        (python_finding((3, 10, 9)), FAIL, "3.10.9"),
        (python_finding((3, 14, 0)), FAIL, "install Python 3.11, 3.12 or 3.13"),
        (
            cpu_finding("x86_64", "model name\t: X\nflags\t\t: avx2 avx512_bf16 amx_bf16\n\nflags\t\t: none"),
            OK,
            "amx_bf16 and avx512_bf16",
        ),
        (cpu_finding("x86_64", "model name\t: X\nflags\t\t: avx512_bf16\n"), OK, "X, avx512_bf16, no AMX"),
        (cpu_finding("x86_64", "model name\t: X\nflags\t\t: avx2\n"), WARN, "--dtype float32"),
        (cpu_finding("aarch64", "processor\t: 0\nFeatures\t: fp asimd bf16\n"), OK, "aarch64"),
        (cpu_finding("arm64", ""), OK, "not known"),
        (cores_finding(8, None), OK, "8 cores"),
        (cores_finding(8, 1.5), WARN, "8 cores, of which a quota allows 1.5"),
        (cores_finding(1, None), WARN, "--hybrid 1"),
        (memory_finding(16 * GIB, 12 * GIB, None), OK, "12.0 GiB free of 16.0 GiB"),
        (memory_finding(16 * GIB, 12 * GIB, 2 * GIB), WARN, "the container's limit leaves 2.0 GiB"),
        (memory_finding(16 * GIB, 1 * GIB, 13 * GIB), WARN, "start fewer workers"),
        (shm_finding(8 * GIB, 8 * GIB), OK, "8,192 MiB free"),
        (shm_finding(64 * 2**20, 64 * 2**20), WARN, "--shm-size"),
        (open_files_finding(1024, 4096), WARN, "ulimit -n"),
        (open_files_finding(65536, 65536), OK, "65536"),
        (open_files_finding(resource.RLIM_INFINITY, resource.RLIM_INFINITY), OK, "unlimited"),
        (gpu_finding("NVIDIA H100, 81559 MiB\n", "13.0"), OK, "NVIDIA H100"),
        (gpu_finding("NVIDIA H100, 81559 MiB\n", None), WARN, "CUDA build of torch"),
        (gpu_finding("\n", None), OK, "CPU"),
        (pytorch_finding("2.13.0", "5.23.0", "13.0"), OK, "CUDA 13.0"),
        (pytorch_finding(None, "5.23.0", None), FAIL, "torch is not installed"),
        (pytorch_finding("2.13.0", None, None), FAIL, "transformers is not installed"),
        (cma_finding("", ""), OK, "allowed"),
        (cma_finding("Operation not permitted", "1"), WARN, "kernel.yama.ptrace_scope=0"),
        (cma_finding("Operation not permitted", ""), WARN, "SYS_PTRACE"),
    ],
)
def test_a_check_says_what_it_found_and_what_to_do(finding: Finding, verdict: CheckStatus, words: str) -> None:
    assert finding.verdict is verdict
    assert words in f"{finding.found} → {finding.advice}"
    assert bool(finding.advice) == (verdict is not OK)


@pytest.mark.parametrize(
    ("version", "nixl", "local", "verdicts"),
    [
        ("1.5.1", FAST, FAST, [OK, OK]),
        ("1.5.1", Measured(transport="tcp", bytes_per_s=2e9), FAST, [WARN, OK]),
        ("1.5.1", BROKEN, FAST, [WARN, OK]),
        (None, Measured(problem="not installed"), FAST, [WARN, OK]),
        ("1.5.1", FAST, BROKEN, [OK, WARN]),
        ("1.5.1", BROKEN, BROKEN, [FAIL, FAIL]),
    ],
)
def test_one_way_of_moving_kv_has_to_work(
    version: str | None, nixl: Measured, local: Measured, verdicts: list[CheckStatus]
) -> None:
    found = list(transfer_findings(version, nixl, local))
    assert [finding.verdict for finding in found] == verdicts
    assert all(
        "5.2 GB/s between two processes over cma" in f.found for f, v in zip(found, verdicts, strict=True) if v is OK
    )


def test_a_port_that_is_taken_is_named_with_its_flag() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        http, grpc = ports({"BATON_HTTP_PORT": str(port), "BATON_GRPC_PORT": "0"})
    assert (http.name, http.verdict, grpc.verdict) == (f"port {port}", WARN, OK)
    assert "--http-port" in http.advice


def test_a_directory_need_not_exist_but_must_be_possible(tmp_path: Path) -> None:
    assert directory_finding("logs", tmp_path / "a" / "b", "advice").verdict is OK
    assert not (tmp_path / "a").exists(), "nothing is made"
    (tmp_path / "file").touch()
    assert directory_finding("logs", tmp_path / "file" / "b", "advice").verdict is WARN


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_without_permission_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o500)
    assert directory_finding("logs", tmp_path / "closed" / "b", "advice").verdict is WARN


def test_without_any_redis_baton_up_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(environ: object) -> Path:
        raise ConfigError("no Redis found: give --redis-url")

    monkeypatch.setattr(private_redis, "find_server", nothing)
    (found,) = doctor_software.redis({})
    assert (found.verdict, found.advice) == (FAIL, "no Redis found: give --redis-url")


def test_a_redis_that_is_given_has_to_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"redis://127.0.0.1:{taken.getsockname()[1]}/0"
    (found,) = doctor_software.redis({"BATON_REDIS_URL": url})
    assert found.verdict is FAIL
    (found,) = doctor_software.redis({"BATON_REDIS_URL": "http://h"})
    assert "redis://" in found.advice


def test_a_check_that_breaks_does_not_hide_the_others() -> None:
    def broken() -> Iterator[Finding]:
        yield ok("a", "first")
        raise OSError("strange machine")

    def fine() -> Iterator[Finding]:
        yield warn("b", "found", "advice")

    found = list(findings.findings({"broken": broken, "fine": fine}))
    assert [finding.name for finding in found] == ["a", "broken", "b"]
    assert "strange machine" in found[1].found
    assert not findings.is_missing_something(found)
    assert findings.is_missing_something([*found, fail("c", "found", "advice")])


def test_the_checks_that_start_nothing_work_on_this_machine() -> None:
    slow = {"transfer", "cross-process reads"}
    found = list(findings.findings({name: check for name, check in findings.CHECKS.items() if name not in slow}))
    assert not [finding for finding in found if "could not be examined" in finding.found]
    assert {"python", "cpu", "cores", "memory", "open files", "gpu", "pytorch", "redis", "ray", "logs"} <= {
        f.name for f in found
    }


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has this system call")
def test_reading_another_process_is_really_tried() -> None:
    (found,) = doctor_links.cross_process_reads()
    assert "said nothing" not in found.found
    assert found.verdict is OK or "refused" in found.found


def test_a_process_that_ends_early_is_said_in_its_own_words() -> None:
    with pytest.raises(doctor_links._PairFailed, match=r"No module named '?baton.nothing"):
        doctor_links._pair(["baton.nothing"], ["baton.fleet.doctor.doctor_cma", "reader"], 10.0)


def test_a_process_that_says_nothing_is_ended_in_time() -> None:
    with pytest.raises(doctor_links._PairFailed, match="said nothing"):
        doctor_links._pair(
            ["baton.fleet.doctor.doctor_cma", "reader"], ["baton.fleet.doctor.doctor_cma", "reader"], 0.5
        )
