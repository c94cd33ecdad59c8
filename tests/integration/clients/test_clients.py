"""Unmodified clients against a cluster of one prefill and one decode worker over NIXL.

Each script of `scripts/` runs in the clients' own virtual environment, which `make test` builds from
`requirements.lock`, so that no client constrains the versions of the project.
"""

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
import pytest_asyncio

from tests.cluster import ProcessCluster, process_cluster
from tests.demo_vocabulary import DEMO_EOS_TOKEN_IDS, demo_tokens
from tests.json_schema_suite import suite
from tests.random_schemas import random_schema
from tests.scale import sized
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


PATTERNS = (
    r"[a-z]{2,6}( [a-z]{2,6}){1,4}\.",
    r"(19|20)\d{2}-(0[1-9]|1[0-2])-[0-3]\d",
    r"\[(-?[1-9]\d{0,3}, ){1,4}0\]",
    r"(yes|no|may be)( indeed)?",
    r"[A-Z]\w{1,8}@[a-z]{1,8}\.(com|org)",
    r"(?:\+\d{1,3} )?\(\d{3}\) \d{3}-\d{4}",
    r"#[0-9a-f]{6}",
)
CLOSING = dict.fromkeys(map(str, DEMO_EOS_TOKEN_IDS), 6) | {
    str(token): 6 for token, text in enumerate(demo_tokens()) if text in (b'"', b"}", b"]")
}
"""Bias that ends answers, strings and objects, which the demo model seldom does."""


async def test_finished_answers_match_their_constraint(cluster: ProcessCluster) -> None:
    """Five answers each to random schemas, to those of the JSON-Schema-Test-Suite that are supported, and to
    patterns."""
    schemas = [case.schema for case in suite()[:: sized(24, 1)]]
    schemas += [random_schema(number) for number in range(sized(12, 1000))]
    bodies = [{"structured_outputs": {"json": schema}} for schema in schemas]
    bodies += [{"structured_outputs": {"regex": pattern}} for pattern in PATTERNS]
    limit = asyncio.Semaphore(8)
    async with httpx.AsyncClient(base_url=cluster.url, timeout=120.0) as http:

        async def answers(number: int, body: dict[str, Any]) -> list[str] | None:
            """Return the finished answers; None if the schema is refused."""
            fixed = {"prompt": f"Answer {number}: ", "max_tokens": 64, "n": 5, "seed": number, "logit_bias": CLOSING}
            async with limit:
                response = await http.post("/v1/completions", json=fixed | body)
            if response.status_code == 400:
                assert response.json()["error"]["code"] in ("invalid_grammar", "invalid_request")
                return None
            assert response.status_code == 200, response.text
            return [choice["text"] for choice in response.json()["choices"] if choice["finish_reason"] == "stop"]

        found = await asyncio.gather(*(answers(number, body) for number, body in enumerate(bodies)))
    for body, texts in zip(bodies, found, strict=True):
        rule = body["structured_outputs"]
        for text in texts or ():
            if "regex" in rule:
                assert re.fullmatch(rule["regex"], text), (rule, text)
            else:
                jsonschema.Draft202012Validator(rule["json"]).validate(json.loads(text))
    served = [texts for texts in found if texts is not None]
    assert len(served) >= sized(25, 1160)
    assert sum(map(len, served)) > 3 * len(served)  # of five
