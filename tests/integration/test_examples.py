"""Runs each program of examples/ as its first lines say, against one cluster that uses the example policy."""

import ast
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
CLIENTS_PYTHON = EXAMPLES.parent / ".venv-clients" / "bin" / "python"
KEYS = ("OPENAI_API_KEY", "ANTHROPIC_API_KEY")
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
    """Run one program and return the lines that it prints. No key is set.

    `messages.py` runs in the environment of the tested clients: the project itself has no `anthropic`.
    """
    is_anthropic = program == "messages.py"
    environment = {name: value for name, value in os.environ.items() if name not in KEYS}
    process = await asyncio.create_subprocess_exec(
        str(CLIENTS_PYTHON) if is_anthropic else sys.executable,
        str(EXAMPLES / program),
        *arguments,
        "--base-url",
        cluster.url if is_anthropic else f"{cluster.url}/v1",
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


async def test_agent_calls_a_forced_tool_and_answers(cluster: ProcessCluster) -> None:
    call, answer = await run(cluster, "agent.py", "--tool", "python_help")
    assert call.startswith("call    python_help({")
    assert "-> 'Python Library Documentation: " in call
    assert answer.removeprefix("answer  ").strip()


async def test_structured_output_prints_every_field_of_the_schema(cluster: ProcessCluster) -> None:
    lines = await run(cluster, "structured_output.py")
    card = {name: ast.literal_eval(value) for name, value in (line.split(maxsplit=1) for line in lines)}
    assert list(card) == ["module", "summary", "num_arguments", "may_fail"]
    assert card["module"] in ("os", "json", "math")
    assert len(card["summary"]) <= 60
    assert card["num_arguments"] in range(10)
    assert isinstance(card["may_fail"], bool)


async def test_reasoning_of_a_model_without_reasoning_is_an_answer(cluster: ProcessCluster) -> None:
    answer, tokens = await run(cluster, "reasoning.py", "--no-thinking")
    assert answer.startswith("[answers] ")
    assert tokens.endswith(" 0 of them reasoning")


async def test_responses_continue_a_conversation_that_the_client_holds(cluster: ProcessCluster) -> None:
    first, answer, _, second, other, warm = await run(cluster, "responses.py")
    assert (first, second) == ("> What does os.getcwd do?", "> What does os.chdir do?")
    assert "current working directory" in answer
    assert other
    assert other != answer
    assert int(warm.split()[0]) > 0


async def test_messages_count_call_and_stream(cluster: ProcessCluster) -> None:
    assert CLIENTS_PYTHON.exists(), f"{CLIENTS_PYTHON} is missing: run make clients"
    tokens, call, answer, stop = await run(cluster, "messages.py")
    assert int(tokens.split()[1]) > 0
    assert call.startswith("call    python_help({'name': ")
    assert answer.removeprefix("answer  ").strip()
    assert stop.split()[1] in ("end_turn", "max_tokens")


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
    """A client whose model gives these messages, one after another. It keeps the messages that it got."""

    def __init__(self, *replies: SimpleNamespace) -> None:
        self.replies = list(replies)
        self.messages: list[Any] = []
        self.choices: list[Any] = []
        self.chat = SimpleNamespace(completions=self)

    def create(self, *, messages: list[Any], tool_choice: Any, **_: Any) -> Any:
        self.messages = list(messages)
        self.choices.append(tool_choice)
        return SimpleNamespace(choices=[SimpleNamespace(message=self.replies.pop(0))])


def text(content: str) -> SimpleNamespace:
    return SimpleNamespace(content=content, tool_calls=None)


def call(name: str, arguments: str) -> SimpleNamespace:
    function = SimpleNamespace(name=name, arguments=arguments)
    return SimpleNamespace(content=None, tool_calls=[SimpleNamespace(id="call_1", function=function)])


def example(name: str) -> ModuleType:
    spec = spec_from_file_location(f"{name}_example", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def test_agent_uses_tools_until_the_model_answers(capsys: pytest.CaptureFixture[str]) -> None:
    model = ScriptedModel(
        call("calculate", '{"expression": "__import__(\'os\').getpid()"}'),
        call("calculate", '{"expression": "17 * 23"}'),
        text("It is 391."),
    )
    assert example("agent").run(model, "scripted", "How much is 17 * 23?", "calculate") == "It is 391."
    refused, result = (m["content"] for m in model.messages if isinstance(m, dict) and m["role"] == "tool")
    assert refused.startswith("error: ValueError: only numbers")
    assert result == "391"
    assert model.choices == [{"type": "function", "function": {"name": "calculate"}}, "auto", "auto"]
    assert capsys.readouterr().out.count("call    calculate(") == 2


async def test_agent_stops_after_too_many_turns() -> None:
    loop = example("agent")
    model = ScriptedModel(*[call("unknown", "{}")] * 10)
    assert loop.run(model, "scripted", "?").startswith("no answer after 5 turns")
    assert len(model.replies) == 10 - loop.MAX_TURNS


async def test_reasoning_is_apart_from_the_answer_and_counted() -> None:
    details = SimpleNamespace(reasoning_tokens=3)
    usage = SimpleNamespace(completion_tokens=5, completion_tokens_details=details)
    deltas = [SimpleNamespace(reasoning_content="2 + 2", content=None), SimpleNamespace(content="4")]
    chunks = [SimpleNamespace(choices=[SimpleNamespace(delta=delta)], usage=None) for delta in deltas]
    completions = SimpleNamespace(create=lambda **_: iter([*chunks, SimpleNamespace(choices=[], usage=usage)]))
    client = SimpleNamespace(chat=SimpleNamespace(completions=completions))
    parts = list(example("reasoning").stream(client, "scripted", "2 + 2?", thinking=True))
    assert parts == [("thinks", "2 + 2"), ("answers", "4"), ("tokens", "5, 3 of them reasoning")]
