"""Findings of each check for given facts, and a run of all checks on the machine that runs the tests."""

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
from baton.fleet.doctor.doctor_links import (
    BACKENDS,
    LinkMeasurement,
    ProcessPairFailed,
    auto_findings,
    cma_finding,
    transfer_findings,
)
from baton.fleet.doctor.doctor_machine import (
    cores_finding,
    cpu_finding,
    gpu_finding,
    memory_finding,
    open_files_finding,
    shm_finding,
)
from baton.fleet.doctor.doctor_software import directory_finding, ports, python_finding, pytorch_finding
from tests.free_port import free_port

GIB = 2**30
OK, WARN, FAIL = CheckStatus.OK, CheckStatus.WARN, CheckStatus.FAIL
FAST = LinkMeasurement(transport="cma", bytes_per_s=5.2e9)
BROKEN = LinkMeasurement(problem="no such device")


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
        (cpu_finding("arm64", ""), OK, "flags unknown"),
        (cores_finding(8, None), OK, "8 cores"),
        (cores_finding(8, 1.5), WARN, "8 cores, but the CPU quota allows 1.5"),
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
def test_finding_states_fact_and_advice(finding: Finding, verdict: CheckStatus, words: str) -> None:
    assert finding.verdict is verdict
    assert words in f"{finding.found} → {finding.advice}"
    assert bool(finding.advice) == (verdict is not OK)


@pytest.mark.parametrize(
    ("version", "nixl", "local", "collective", "verdicts"),
    [
        ("1.5.1", FAST, FAST, FAST, [OK, OK, OK, OK]),
        ("1.5.1", LinkMeasurement(transport="tcp", bytes_per_s=2e9), FAST, FAST, [WARN, OK, OK, OK]),
        ("1.5.1", BROKEN, FAST, FAST, [WARN, OK, OK, OK]),
        (None, LinkMeasurement(problem="not installed"), FAST, FAST, [WARN, OK, OK, OK]),
        ("1.5.1", FAST, BROKEN, FAST, [OK, WARN, OK, OK]),
        ("1.5.1", FAST, FAST, BROKEN, [OK, OK, WARN, OK]),
        ("1.5.1", BROKEN, BROKEN, FAST, [WARN, WARN, OK, OK]),
        ("1.5.1", BROKEN, BROKEN, BROKEN, [FAIL, FAIL, FAIL]),
    ],
)
def test_doctor_fails_only_if_all_transfer_backends_fail(
    version: str | None,
    nixl: LinkMeasurement,
    local: LinkMeasurement,
    collective: LinkMeasurement,
    verdicts: list[CheckStatus],
) -> None:
    found = list(transfer_findings(version, {"nixl": nixl, "local": local, "collective": collective}))
    assert [finding.verdict for finding in found] == verdicts
    assert all(
        "5.2 GB/s between two processes over cma" in f.found
        for f, v in zip(found[:3], verdicts[:3], strict=True)
        if v is OK
    )


def test_doctor_fails_if_a_link_is_slower_than_required() -> None:
    measured = dict.fromkeys(BACKENDS, FAST)
    *backends, auto = transfer_findings("1.5.1", measured, min_link_gbps=FAST.bytes_per_s * 8 / 1e9 + 1)
    assert len(backends) == 3
    for finding in backends:
        assert finding.verdict is FAIL
        assert "41.6 Gbit/s, but --min-link-gbps is 42.6" in finding.found
    assert (auto.verdict, auto.advice) == (FAIL, "lower --min-link-gbps")
    found = transfer_findings("1.5.1", measured, min_link_gbps=FAST.bytes_per_s * 8 / 1e9)
    assert [finding.verdict for finding in found] == [OK] * 4


def test_doctor_only_warns_of_a_slow_backend_if_another_one_is_fast_enough() -> None:
    slow = LinkMeasurement(transport="gloo", bytes_per_s=0.75e9)
    measured = {"nixl": FAST, "local": FAST, "collective": slow}
    found = list(transfer_findings("1.5.1", measured, min_link_gbps=40))
    assert [finding.verdict for finding in found] == [OK, OK, WARN, OK]


def test_doctor_names_the_backend_that_auto_would_use_and_the_speeds() -> None:
    slow = LinkMeasurement(transport="gloo", bytes_per_s=0.75e9)
    (found,) = auto_findings({"nixl": BROKEN, "local": slow, "collective": FAST})
    assert found == ok(
        "auto transfer",
        "would use collective between two processes of this machine: nixl failed, local 0.75 GB/s, collective 5.2 GB/s",
    )
    (found,) = auto_findings({"nixl": slow, "local": FAST, "collective": FAST}, min_link_gbps=41)
    assert found.found.startswith("would use local "), "workers prefer the first of equally fast backends"


def test_checks_of_links_are_those_that_start_processes() -> None:
    every, links = findings.checks_for(1.0), findings.checks_for(1.0, links_only=True)
    assert list(every) == list(findings.CHECKS)
    assert list(links) == list(findings.CHECKS)[-3:]


def test_used_port_is_reported_with_its_flag() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        http, grpc = ports({"BATON_HTTP_PORT": str(port), "BATON_GRPC_PORT": "0"})
    assert (http.name, http.verdict, grpc.verdict) == (f"port {port}", WARN, OK)
    assert "--http-port" in http.advice


def test_directory_need_not_exist_but_must_be_creatable(tmp_path: Path) -> None:
    assert directory_finding("logs", tmp_path / "a" / "b", "advice").verdict is OK
    assert not (tmp_path / "a").exists(), "the check creates nothing"
    (tmp_path / "file").touch()
    assert directory_finding("logs", tmp_path / "file" / "b", "advice").verdict is WARN


@pytest.mark.skipif(os.geteuid() == 0, reason="root can write everywhere")
def test_directory_without_write_permission_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o500)
    assert directory_finding("logs", tmp_path / "closed" / "b", "advice").verdict is WARN


def test_missing_redis_is_a_failure() -> None:
    def find_nothing(environ: object) -> Path:
        raise ConfigError("no Redis found: give --redis-url")

    (found,) = doctor_software.redis({}, find=find_nothing)
    assert (found.verdict, found.advice) == (FAIL, "no Redis found: give --redis-url")


def test_configured_redis_must_answer() -> None:
    url = f"redis://127.0.0.1:{free_port('127.0.0.1')}/0"
    (found,) = doctor_software.redis({"BATON_REDIS_URL": url})
    assert found.verdict is FAIL
    (found,) = doctor_software.redis({"BATON_REDIS_URL": "http://h"})
    assert "redis://" in found.advice


def test_exception_in_one_check_does_not_hide_the_others() -> None:
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


def test_checks_without_processes_work_on_this_machine() -> None:
    slow = {"transfer", "cross-process reads", "gpu kv"}
    found = list(findings.findings({name: check for name, check in findings.CHECKS.items() if name not in slow}))
    assert not [finding for finding in found if "the check failed" in finding.found]
    assert {"python", "cpu", "cores", "memory", "open files", "gpu", "pytorch", "redis", "ray", "logs"} <= {
        f.name for f in found
    }


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has this system call")
def test_cross_process_read_is_tried_for_real(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_links, "CMA_TIMEOUT_S", 60.0)  # both processes must start in this time
    (found,) = doctor_links.cross_process_reads()
    assert "printed nothing" not in found.found
    assert found.verdict is OK or "refused" in found.found


def test_error_of_a_failed_process_is_its_own_last_line() -> None:
    with pytest.raises(ProcessPairFailed, match=r"No module named '?baton.nothing"):
        doctor_links.run_pair(["baton.nothing"], ["baton.fleet.doctor.doctor_cma", "reader"], 60.0)


def test_silent_process_is_killed_after_the_timeout() -> None:
    with pytest.raises(ProcessPairFailed, match="printed nothing"):
        doctor_links.run_pair(
            ["baton.fleet.doctor.doctor_cma", "reader"], ["baton.fleet.doctor.doctor_cma", "reader"], 0.5
        )
