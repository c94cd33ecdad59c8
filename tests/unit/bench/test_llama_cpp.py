"""How llama.cpp's server is started for a batch, and when its times are refused."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from bench.systems import llama_cpp
from bench.systems.engines import EngineFailed
from bench.systems.llama_cpp import (
    MAX_OUTPUT_TOKENS,
    LlamaEngine,
    LlamaTools,
    ServerShape,
    require_streamed,
    server_command,
    server_shape,
)


def test_each_sequence_has_a_slot_that_holds_its_answer() -> None:
    shape = server_shape([[1] * 256] * 8)
    assert shape.slots == 8
    assert 256 + MAX_OUTPUT_TOKENS <= shape.slot_tokens < 256 + MAX_OUTPUT_TOKENS + 64
    assert server_shape([[1] * 100, [1] * 2048]) == ServerShape(2, 2048 + MAX_OUTPUT_TOKENS)


def test_memory_is_that_of_all_slots_and_nothing_is_cached_elsewhere() -> None:
    command = server_command(Path("llama-server"), Path("m.gguf"), ServerShape(4, 512), 8000)
    assert command[command.index("--ctx-size") + 1] == "2048"
    assert command[command.index("--parallel") + 1] == "4"
    assert command[command.index("--cache-ram") + 1] == "0"


def test_missing_binaries_are_named(tmp_path: Path) -> None:
    (tmp_path / "llama-server").touch()
    with pytest.raises(EngineFailed, match="has no llama-quantize; build"):
        LlamaEngine(LlamaTools(tmp_path), tmp_path / "m.gguf", tmp_path / "log")


def test_version_is_what_the_server_prints_on_standard_error(tmp_path: Path) -> None:
    tool = tmp_path / "llama-server"
    tool.write_text("#!/bin/sh\necho 'load_backend: loaded' >&2\necho 'version: 11434 (1a2b3c4)' >&2\n")
    tool.chmod(0o755)
    assert LlamaTools(tmp_path).version() == "version: 11434 (1a2b3c4)"


def test_a_failed_quantisation_leaves_no_file(tmp_path: Path) -> None:
    tool = tmp_path / "llama-quantize"
    tool.write_text('#!/bin/sh\necho part > "$2"\nexit 3\n')
    tool.chmod(0o755)
    file = tmp_path / "m-Q4_0.gguf"
    with pytest.raises(EngineFailed, match="cannot write Q4_0"):
        LlamaTools(tmp_path).quantise(tmp_path / "m.gguf", "Q4_0", file, tmp_path / "log")
    assert not file.exists()


def test_tokens_that_arrive_in_few_messages_have_no_times() -> None:
    require_streamed([[0.1] * 33, [0.1] * 17], 33)
    with pytest.raises(EngineFailed, match="33 tokens in 16 messages"):
        require_streamed([[0.1] * 33, [0.1] * 16], 33)


def test_a_server_is_warm_before_its_first_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("llama-server", "llama-quantize"):
        (tmp_path / name).touch()
    events: list[str] = []

    def running(*_arguments: Any, **_fields: Any) -> AbstractContextManager[None]:
        events.append("start")
        return nullcontext()

    class FakeServer:
        def __init__(self, *_arguments: Any) -> None: ...

        def __call__(self, prompts: Sequence[Sequence[int]], num_outputs: int) -> list[list[float]]:
            events.append(f"{len(prompts)} x {len(prompts[0])}, {num_outputs}")
            return [[0.1] * num_outputs] * len(prompts)

    monkeypatch.setattr(llama_cpp, "running_server", running)
    monkeypatch.setattr(llama_cpp, "ServedEngine", FakeServer)
    engine = LlamaEngine(LlamaTools(tmp_path), tmp_path / "m.gguf", tmp_path / "log")
    engine([[1] * 16] * 2, 1)
    engine([[1] * 16] * 2, 33)
    assert events == ["start", "2 x 128, 2", "2 x 16, 1", "2 x 16, 33"]
    engine.rest()
    engine([[1] * 16] * 2, 33)
    assert events[4:] == ["start", "2 x 128, 2", "2 x 16, 33"]
