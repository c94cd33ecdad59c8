"""A process that loads no model does not load torch either, although NIXL asks for its version."""

import subprocess
import sys

import pytest

CREATE_AN_AGENT = """
import sys
from baton.transfer.backends.nixl_backend import _new_agent
_new_agent("test")
print(sorted({"torch", "nixl"} & sys.modules.keys()))
"""


@pytest.mark.integration
def test_agent_is_created_without_torch() -> None:
    done = subprocess.run([sys.executable, "-c", CREATE_AN_AGENT], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "['nixl']"
