"""Runs each program of examples/ as its first lines say, against one cluster that uses the example policy."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio

from baton.rpc.admin_rpc import AdminClient
from baton.rpc.channel import channel_options, open_channel
from tests.cluster import ProcessCluster, process_cluster
from tests.times import LONG_TIMES

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
POLICY = "most_free:most_free"


@contextmanager
def importable(directory: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(directory), prepend=os.pathsep)
        yield


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[ProcessCluster]:
    with importable(EXAMPLES):
        async with process_cluster(prefill=1, decode=1, transfer="local", policy=POLICY, **LONG_TIMES) as running:
            yield running


async def run(cluster: ProcessCluster, program: str, *arguments: str) -> list[str]:
    """Run one program and return the lines that it prints. No key is set."""
    environment = {name: value for name, value in os.environ.items() if name != "OPENAI_API_KEY"}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(EXAMPLES / program),
        *arguments,
        "--base-url",
        f"{cluster.url}/v1",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment,
    )
    output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    return output.decode().splitlines()


async def test_agent_answers_what_the_demo_model_knows(cluster: ProcessCluster) -> None:
    (line,) = await run(cluster, "agent.py", "What does os.getcwd do?")
    assert line.startswith("answer  Return a")
    assert "current working directory" in line


async def test_rag_computes_the_document_once_and_answers_from_it(cluster: ProcessCluster) -> None:
    first, answer, cold, second, _, warm = await run(cluster, "rag.py")
    assert (first, second) == ("What does json.dumps do?", "What does json.loads do?")
    assert "JSON formatted" in answer
    words = warm.split()
    num_cached, num_prompt_tokens = int(words[0]), int(words[2])
    assert int(cold.split()[0]) < 0.1 * num_prompt_tokens
    assert num_cached > 0.9 * num_prompt_tokens > 500


async def test_batch_answers_each_line_and_continues_where_it_was_interrupted(
    cluster: ProcessCluster, tmp_path: Path
) -> None:
    out = tmp_path / "answers.jsonl"
    questions = (EXAMPLES / "questions.txt").read_text().splitlines()
    out.write_text(json.dumps({"line": 1, "question": questions[0], "answer": "from before"}) + "\n")
    (line,) = await run(cluster, "batch.py", str(EXAMPLES / "questions.txt"), "--out", str(out))
    assert line.startswith(f"{len(questions)} of {len(questions)} lines in {out}, 1 of them from before, 0 failed, ")
    answers = {each["line"]: each["answer"] for each in map(json.loads, out.read_text().splitlines())}
    assert sorted(answers) == [*range(1, len(questions) + 1)]
    assert answers[1] == "from before"
    assert "square root" in answers[questions.index("What does math.sqrt do?") + 1]


async def test_cluster_places_with_the_example_policy_and_records_its_name(cluster: ProcessCluster) -> None:
    await run(cluster, "agent.py")
    async with open_channel(cluster.grpc_address, channel_options(10.0)) as channel:
        (record, *_) = await AdminClient(channel, cluster.grpc_address, call_s=60.0).explain(None)
    assert record.policy == POLICY
    assert all(candidate.terms["free_blocks"] > 0 for candidate in record.candidates)


class ScriptedModel:
    """A client whose model gives these replies, one after another. It keeps the messages that it got."""

    def __init__(self, *replies: str) -> None:
        self.replies = list(replies)
        self.messages: list[dict[str, str]] = []
        self.chat = SimpleNamespace(completions=self)

    def create(self, *, messages: list[dict[str, str]], **_: Any) -> Any:
        self.messages = list(messages)
        return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(content=self.replies.pop(0)))])


def agent() -> ModuleType:
    spec = spec_from_file_location("agent_example", EXAMPLES / "agent.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def test_agent_uses_tools_until_the_model_answers(capsys: pytest.CaptureFixture[str]) -> None:
    model = ScriptedModel(
        '{"tool": "calculate", "input": "__import__(\'os\').getpid()"}',
        'I try again: {"tool": "calculate", "input": "17 * 23"}',
        "It is 391.",
    )
    assert agent().run(model, "scripted", "How much is 17 * 23?") == "It is 391."
    refused, result = (m["content"] for m in model.messages if m["content"].startswith("Result: "))
    assert refused.startswith("Result: error: ValueError: only numbers")
    assert result == "Result: 391"
    assert capsys.readouterr().out.count("action  calculate(") == 2


async def test_agent_stops_after_too_many_actions() -> None:
    loop = agent()
    model = ScriptedModel(*['{"tool": "unknown", "input": ""}'] * 10)
    assert loop.run(model, "scripted", "?").startswith("no answer after 5 actions")
    assert len(model.replies) == 10 - loop.MAX_ACTIONS - 1
