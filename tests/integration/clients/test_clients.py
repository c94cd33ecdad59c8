"""Unmodified clients against a cluster of one prefill and one decode worker over NIXL.

Each script of `scripts/` runs in the clients' own virtual environment, which `make test` builds from
`requirements.lock`, so that no client constrains the versions of the project.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.cluster import ProcessCluster, process_cluster
from tests.times import LONG_TIMES

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]

ROOT = Path(__file__).resolve().parents[3]
PYTHON = ROOT / ".venv-clients" / "bin" / "python"
SCRIPTS = Path(__file__).parent / "scripts"
NAMES = sorted(script.stem for script in SCRIPTS.glob("*_*.py"))
KEEPS_OUT = ("OPENAI_", "ANTHROPIC_", "LANGCHAIN_", "LANGSMITH_", "LITELLM_", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
"""Variables that would change what a client does."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[ProcessCluster]:
    async with process_cluster(prefill=1, decode=1, **LONG_TIMES) as running:
        yield running


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.upper().startswith(KEEPS_OUT)}
    kept.pop("PYTHONPATH", None)
    return {**kept, "NO_PROXY": "*", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false"}


@pytest.mark.parametrize("name", NAMES)
async def test_client_works_unmodified(cluster: ProcessCluster, name: str) -> None:
    assert PYTHON.exists(), f"{PYTHON} is missing: run make clients"
    process = await asyncio.create_subprocess_exec(
        str(PYTHON),
        str(SCRIPTS / f"{name}.py"),
        cluster.url,
        "no-key",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=environment(),
    )
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, output.decode()[-6000:]
