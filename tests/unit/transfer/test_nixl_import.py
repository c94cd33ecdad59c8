"""A process that loads no model does not load torch either, although NIXL asks for its version."""

import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from baton.transfer.backends.nixl import nixl_agent

CREATE_AN_AGENT = """
import sys
from baton.transfer.backends.nixl.nixl_agent import new_agent
new_agent("test")
print(sorted({"torch", "nixl"} & sys.modules.keys()))
"""


@pytest.mark.integration
def test_agent_is_created_without_torch() -> None:
    done = subprocess.run([sys.executable, "-c", CREATE_AN_AGENT], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "['nixl']"


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("cuda: Optional[str] = None\n", True),
        ("cuda = None\nhip = '6.4'\n", True),
        ("debug = False\ncuda: Optional[str] = '12.8'\n", False),
        ('cuda = "13.0"\n', False),
        (None, False),
    ],
)
def test_build_of_torch_is_read_from_its_version_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str | None, expected: bool
) -> None:
    if version is not None:
        (tmp_path / "version.py").write_text(version)
    spec = ModuleSpec("torch", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(nixl_agent, "find_spec", lambda _name: spec)
    assert nixl_agent._torch_has_no_cuda() == expected
