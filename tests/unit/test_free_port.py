"""A port of one test is not given to another test, in this process or in another one."""

import subprocess
import sys

import pytest

from baton.core.errors import ConfigError
from tests import free_port

HOLD_A_PORT = "from tests.free_port import free_port; print(free_port('127.0.0.1'), flush=True); input()"


def test_port_of_another_test_process_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD_A_PORT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        port = int(other.stdout.readline())
        monkeypatch.setattr(free_port, "FIRST_PORT", port)
        monkeypatch.setattr(free_port, "LAST_PORT", port)
        with pytest.raises(ConfigError, match="no port could be reserved"):
            free_port.free_port("127.0.0.1")
        other.communicate("\n")
    assert free_port.free_port("127.0.0.1") == port
    with pytest.raises(ConfigError, match="no port could be reserved"):
        free_port.free_port("127.0.0.1")
