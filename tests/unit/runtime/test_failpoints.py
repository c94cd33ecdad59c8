import os
import signal
import subprocess
import sys
import time

import pytest

from baton.core.errors import ConfigError
from baton.runtime.failpoints import FailpointError, Failpoints


def fires(points: Failpoints, name: str, **context: object) -> bool:
    try:
        points.hit(name, **context)
    except FailpointError:
        return True
    return False


def test_hit_without_rules_does_not_raise() -> None:
    Failpoints("").hit("engine.step", token=1)


def test_raise_rule_raises_its_text_at_every_hit() -> None:
    points = Failpoints("engine.step=raise:no memory left")
    for _ in range(2):
        with pytest.raises(FailpointError, match="no memory left"):
            points.hit("engine.step")
    points.hit("engine.other")


def test_rule_with_a_hit_number_fires_once() -> None:
    points = Failpoints("engine.step=raise@3")
    assert [fires(points, "engine.step") for _ in range(5)] == [False, False, True, False, False]


def test_rule_with_context_counts_matching_hits_only() -> None:
    points = Failpoints("engine.step[token=123,worker=w0]=raise@2")
    points.identify(worker="w0")
    hits = [7, 123, 7, 123, 123]
    assert [fires(points, "engine.step", token=token) for token in hits] == [False, False, False, True, False]
    points.identify(worker="w1")
    assert not fires(Failpoints("engine.step[worker=w0]=raise"), "engine.step")


def test_rules_of_one_text_are_independent() -> None:
    points = Failpoints(" a=raise:first ; b=raise:second@1; ")
    assert fires(points, "b")
    assert not fires(points, "b")
    assert fires(points, "a")


def test_sleep_blocks_the_caller() -> None:
    start_s = time.monotonic()
    Failpoints("a=sleep:0.05").hit("a")
    assert time.monotonic() - start_s >= 0.05


@pytest.mark.parametrize(
    "text", ["a", "a=", "a=explode", "a=sleep", "a=sleep:soon", "a=exit:x", "a[b]=exit", "a=raise@0", "a b=raise"]
)
def test_invalid_rule_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="BATON_FAILPOINTS"):
        Failpoints(text)


def start(rules: str, code: str) -> subprocess.Popen[str]:
    environ = {**os.environ, "BATON_FAILPOINTS": rules}
    program = f"from baton.runtime import failpoints\n{code}"
    return subprocess.Popen(
        [sys.executable, "-c", program], env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize(("action", "code"), [("exit", 137), ("exit:9", 9)])
def test_exit_rule_ends_the_process_and_writes_to_stderr(action: str, code: int) -> None:
    process = start(f"here={action}@2", "for n in range(3): print(n, flush=True); failpoints.hit('here', n=n)")
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (code, "0\n1\n")
    assert "failpoint" in err


def test_stop_rule_stops_the_process_until_sigcont() -> None:
    process = start("here=stop", "failpoints.hit('here'); print('continued', flush=True)")
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    process.send_signal(signal.SIGCONT)
    out, _ = process.communicate(timeout=30)
    assert out == "continued\n"
