"""`loadgen run` as a user runs it: real processes, exit codes and the files of the result."""

import json
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from loadgen.measure.records import Record
from loadgen.measure.records_file import Result, from_json, read_result
from loadgen.measure.request_metrics import OutcomeRules, RequestOutcome, classify
from loadgen.plan.plan_file import plan_hash, write_plan
from tests.integration.loadgen.rig import LOADGEN, ROOT
from tests.unit.loadgen.plans import plan, request

LIMIT_S = 90

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Run a scripted server and yield its address. 32 tokens take about 0.3 s."""
    command = [LOADGEN[0], "-m", "loadgen.send.selftest.scripted_server", "--ttft", "20ms", "--gap", "10ms"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.kill()


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hide the user's calibration and API key."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def loadgen(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*LOADGEN, *arguments], capture_output=True, text=True, timeout=LIMIT_S, cwd=ROOT)


def classes(result: Result) -> dict[str, int]:
    rules = OutcomeRules(slos=result.run.slos, ignore_eos=result.run.ignore_eos)
    found = [classify(record, rules) for record in result.records]
    return {outcome.value: found.count(outcome) for outcome in RequestOutcome if outcome in found}


def last_line(text: str) -> tuple[int, dict[str, int]]:
    """Return the offered requests and the outcomes of the last line."""
    match = re.fullmatch(r"offered (\d+) = (.*?)(   INVALID)?", text.strip().splitlines()[-1])
    assert match, text
    return int(match[1]), {
        name: int(count) for name, count in (term.rsplit(" ", 1) for term in match[2].split(" + ")) if int(count)
    }


def test_run_without_plan_stores_its_plan_and_records_every_request(server: str, tmp_path: Path) -> None:
    out = tmp_path / "result"
    arguments = [
        "--rate",
        "25",
        "--seconds",
        "1",
        "--output-tokens",
        "4",
        "--slo",
        "ttft=30s,tpot=5s",
        "--check",
        "--processes",
        "2",
    ]
    done = loadgen(
        "run", *arguments, "--url", server, "--out", str(out), "--api-key", "secret-key", "--header", "X-Also: secret"
    )
    assert done.returncode in (0, 3), done.stderr  # on a busy machine the generator itself may be late, and says so
    result = read_result(out)
    offered, found = last_line(done.stdout)
    assert (offered, found) == (len(result.records), {"good": len(result.records)})
    assert classes(result) == found
    assert result.run.plan_hash == plan_hash(out / "plan.jsonl")
    assert (result.run.processes, result.run.warmup_requests, result.run.model) == (2, 1, "scripted")
    assert (done.returncode == 3) == bool(result.run.invalid) == ("INVALID" in done.stdout)
    assert result.run.check == {"compared": offered, "failed": 0, "skipped": 0, "differing": []}
    assert [record.ended_s for record in ordered(out)] == sorted(record.ended_s for record in ordered(out))
    assert sorted(path.name for path in out.iterdir()) == ["plan.jsonl", "records.jsonl", "run.json"]
    assert result.run.machine["cores"]
    kept = (out / "run.json").read_text() + (out / "records.jsonl").read_text()
    assert "secret" not in kept
    assert result.run.flags["headers"] == ["Authorization", "X-Also"]
    again = loadgen("run", str(out / "plan.jsonl"), "--url", server, "--out", str(out))
    assert (again.returncode, again.stderr.count("\n")) == (2, 1)
    assert "are never overwritten" in again.stderr


def ordered(out: Path) -> list[Record]:
    return [from_json(json.loads(line)) for line in (out / "records.jsonl").read_text().splitlines()]


def interrupt_when_running(
    process: subprocess.Popen[str], out: Path, *, num_files: int = 1, number: int = signal.SIGINT
) -> list[psutil.Process]:
    """Send a signal soon after so many files have records. Return the children that the process had then."""
    assert process.stderr is not None
    for line in process.stderr:
        if line.rstrip().endswith("running"):
            break
    deadline_s = time.monotonic() + LIMIT_S
    while sum(file.stat().st_size > 0 for file in out.glob("records*.jsonl")) < num_files:
        assert process.poll() is None
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    time.sleep(1.0)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    return children


def test_ctrl_c_keeps_results(server: str, tmp_path: Path) -> None:
    out = tmp_path / "result"
    command = [
        *LOADGEN,
        "run",
        "--rate",
        "20",
        "--seconds",
        "60",
        "--url",
        server,
        "--out",
        str(out),
        "--slo",
        "ttft=20s",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        interrupt_when_running(process, out)
        stdout, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130
    result = read_result(out)
    offered, found = last_line(stdout)
    assert (offered, found, result.run.interrupted) == (len(result.records), classes(result), True)
    assert 0 < offered < 400
    assert found["good"] > 0
    assert set(found) <= {"good", "cancelled"}
    assert "INTERRUPTED" in stdout


@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.long), 2])
def test_records_are_readable_after_the_main_process_is_killed(server: str, tmp_path: Path, processes: int) -> None:
    out = tmp_path / "result"
    command = [
        *LOADGEN,
        "run",
        "--rate",
        "20",
        "--seconds",
        "60",
        "--url",
        server,
        "--out",
        str(out),
        "--output-tokens",
        "4",
    ]
    command += ["--processes", str(processes)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        children = interrupt_when_running(process, out, num_files=processes, number=signal.SIGKILL)
        process.communicate(timeout=LIMIT_S)
    _, left = psutil.wait_procs(children, timeout=LIMIT_S)
    assert left == [], "the processes that send see that their parent is gone, and end"
    result = read_result(out)
    assert classes(result)["good"] > 0
    assert result.run.invalid == ("the run did not finish: its main process was killed",)
    files = ["records.jsonl"] if processes == 1 else ["records.0.jsonl", "records.1.jsonl"]
    assert sorted(path.name for path in out.glob("*records*")) == files
    assert len(result.records) == sum(len((out / file).read_text().splitlines()) for file in files)
    assert [record.index for record in result.records] == sorted(record.index for record in result.records)
    assert loadgen("report", str(out)).returncode == 0


def test_invalid_arguments_give_one_line_and_no_result(server: str, tmp_path: Path) -> None:
    broken = tmp_path / "broken.jsonl"
    write_plan(plan(request(0, (0, 8))), broken)
    broken.write_text(broken.read_text() + '{"index": 1, "at_s": "soon"}\n')
    out = ["--out", str(tmp_path / "result")]
    for arguments, message in (
        (["run", str(tmp_path / "none.jsonl"), "--url", server], "none.jsonl: no such file"),
        (["run", str(broken), "--url", server], "broken.jsonl:3: "),
        (
            ["run", "--rate", "5", "--url", "http://127.0.0.1:9"],
            "no server answers at http://127.0.0.1:9: Connection refused",
        ),
        (["run", "--rate", "5", "--url", server, "--slo", "chat:ttft=1s"], "the plan has no class `chat`"),
        (
            ["run", "--rate", "5", "--url", server, "--api-key", "sk-SECRET-é"],
            "characters that are not allowed in a header",
        ),
        (["run", "--rate", "5", "--url", server, "--body", "max_tokens=9"], "max_tokens comes from the plan"),
        (["run", "--rate", "5", "--url", server, "--check", "--body", "temperature=0.7"], "needs greedy decoding"),
        (["run", "--rate", "5", "--url", "http://a..b:80"], "is not a valid address"),
    ):
        done = loadgen(*arguments, *out)
        assert (done.returncode, done.stdout) == (2, "")
        assert message in done.stderr
        assert "Traceback" not in done.stderr
        assert "SECRET" not in done.stderr
        assert not (tmp_path / "result").exists()


def test_plan_above_the_calibrated_rate_is_run_with_a_warning(server: str, tmp_path: Path) -> None:
    out = tmp_path / "result"
    arguments = [
        "--rate",
        "400",
        "--seconds",
        "1s",
        "--input-tokens",
        "4",
        "--output-tokens",
        "2",
        "--url",
        server,
        "--out",
        str(out),
    ]
    done = loadgen("run", *arguments)
    assert done.returncode in (0, 3), done.stderr
    assert "warning: the plan needs up to" in done.stderr
    assert "until `loadgen selftest` has run on this machine" in done.stderr
    assert last_line(done.stdout)[0] == len(read_result(out).records) > 250


def test_check_counts_responses_that_differ(tmp_path: Path) -> None:
    """The server's responses depend on how many requests it has served."""
    code = (
        "import asyncio, sys\n"
        "from loadgen.send.selftest.scripted_server import Script, ScriptedServer\n"
        "async def main():\n"
        "    async with ScriptedServer(lambda served: Script(salt=served.number // 8)) as server:\n"
        "        print(server.url, flush=True)\n"
        "        await asyncio.to_thread(sys.stdin.read)\n"
        "asyncio.run(main())\n"
    )
    planned = plan(*(request(index, (index, 8), at_s=index * 0.01, output=4) for index in range(8)))
    write_plan(planned, tmp_path / "plan.jsonl.gz")
    with subprocess.Popen(
        [LOADGEN[0], "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        out = tmp_path / "result"
        done = loadgen(
            "run",
            str(tmp_path / "plan.jsonl.gz"),
            "--url",
            url,
            "--out",
            str(out),
            "--check",
            "--warmup",
            "0",
            "--quiet",
        )
        process.kill()
    assert done.returncode in (3, 4), done.stderr
    result = read_result(out)
    assert result.run.check["differing"] == [{"index": index, "at": 0} for index in range(8)]
    assert result.run.plan_hash == plan_hash(tmp_path / "plan.jsonl.gz")
    assert "8 of 8 responses differ" in done.stdout


def test_selftest_measures_and_stores_its_result(tmp_path: Path) -> None:
    done = loadgen(
        "selftest", "--rate", "20", "--seconds", "500ms", "--gap", "5ms", "--output-tokens", "8", "--attempts", "1"
    )
    rows = [line.split() for line in done.stdout.splitlines() if line.strip().startswith("20 ")]
    assert rows, done.stderr
    assert all(row[2] == "0" for row in rows)  # nothing was dropped
    is_kept = "timing is accurate" in done.stdout
    assert (done.returncode, (tmp_path / "cache" / "loadgen" / "selftest.json").exists()) == (
        (0, True) if is_kept else (3, False)
    )
