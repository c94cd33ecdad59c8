"""Facts of a run as readable names and values."""

from typing import Any

import pytest

from loadgen.report.configuration import format_bytes, pairs


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"memory_bytes": 25276514304}, [("memory", "23.5 GiB")]),
        ({"loadgen_cpu_s": 0.195, "timeout": 600.0}, [("CPU time of loadgen", "195 ms"), ("client timeout", "600 s")]),
        ({"kv_tokens": 1048576}, [("KV cache", "1,048,576 tokens")]),
        ({"max_model_len": 16384}, [("longest prompt and response", "16,384 tokens")]),
        ({"load_before": [7.43, 6.02]}, [("load average before", "7.43, 6.02")]),
        ({"ignore_eos": True}, [("responses of planned length", "yes")]),
        ({"cpu_quota": None, "headers": [], "body": {}, "label": ""}, []),
        ({"versions": {"numpy": "2.4.6"}}, [("package: numpy", "2.4.6")]),
        ({"slos": {"chat": {"ttft_ms": 500.0}}}, [("SLO: chat: ttft", "500 ms")]),
        ({"models": [{"id": "a", "created": 5}, {"id": "b"}]}, [("models", "a, b")]),
        ({"gpus": [{"name": "H100"}, {"name": "H200"}]}, [("gpus 1: name", "H100"), ("gpus 2: name", "H200")]),
        ({"rate": 4.0, "seed": 1998369075}, [("offered rate", "4 requests/s"), ("seed", "1998369075")]),
    ],
)
def test_facts_have_words_and_units(facts: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    assert pairs(facts) == expected


@pytest.mark.parametrize(
    ("count", "text"), [(512, "512 bytes"), (1024, "1 KiB"), (1227884, "1.17 MiB"), (3 << 30, "3 GiB")]
)
def test_sizes_are_binary(count: int, text: str) -> None:
    assert format_bytes(count) == text
