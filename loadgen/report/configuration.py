"""Turns the recorded facts about run, flags, machine and server into readable (name, value) pairs.

Names are words instead of keys, values have units, and unset facts are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from loadgen.report.scales import format_ms, format_number

Pairs = list[tuple[str, str]]

NAMES = {
    "api": "API",
    "cpu": "CPU",
    "cpu_quota": "CPU quota",
    "ignore_eos": "responses of planned length",
    "insecure": "any TLS certificate accepted",
    "kv_tokens": "KV cache",
    "loadgen_cpu_s": "CPU time of loadgen",
    "load_after": "load average after",
    "load_before": "load average before",
    "max_connections": "most connections",
    "max_model_len": "longest prompt and response",
    "os": "operating system",
    "out": "result directory",
    "plan_hash": "plan SHA-256",
    "input_tokens": "prompt length",
    "output_tokens": "response length",
    "rate": "offered rate",
    "seconds": "arrivals over",
    "slo": "SLO",
    "slos": "SLO",
    "timeout": "client timeout",
    "url": "server",
    "urls": "servers",
    "versions": "package",
    "warmup": "warm-up requests",
    "warmup_requests": "warm-up requests",
}
SECONDS = ("timeout", "seconds")
TOKENS = ("max_model_len", "block_size", "block_size_tokens")
RATES = ("rate",)
BINARY = ("KiB", "MiB", "GiB", "TiB")


def pairs(facts: Mapping[str, Any]) -> Pairs:
    """Return the facts as (name, value); unset and empty ones are left out."""
    return list(_pairs(facts, ""))


def format_bytes(count: float) -> str:
    """Return a size such as `23.5 GiB`."""
    size, unit = float(count), "bytes"
    for larger in BINARY:
        if abs(size) < 1024:
            break
        size, unit = size / 1024, larger
    return f"{format_number(size)} {unit}"


def _pairs(facts: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    for key, value in facts.items():
        name = f"{prefix}{_name(key)}"
        if _is_empty(value):
            continue
        if isinstance(value, Mapping):
            yield from _pairs(value, f"{name}: ")
        elif isinstance(value, Sequence) and not isinstance(value, str) and isinstance(value[0], Mapping):
            yield from _listed(name, value)
        else:
            yield name, _text(key, value)


def _listed(name: str, values: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield objects by their ids, or in full if they have none."""
    if all("id" in one for one in values):
        yield name, ", ".join(str(one["id"]) for one in values)
        return
    for number, one in enumerate(values, 1):
        yield from _pairs(one, f"{name} {number}: " if len(values) > 1 else f"{name}: ")


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str | Sequence | Mapping) and not value)


def _name(key: str) -> str:
    if key in NAMES:
        return NAMES[key]
    words = key.replace("_", " ").strip()
    for unit in (" bytes", " tokens", " ms", " s"):
        words = words.removesuffix(unit)
    return words


def _text(key: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return _number(key, value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(_text("", one) for one in value)
    return str(value)


def _number(key: str, value: float) -> str:
    if key.endswith("_bytes"):
        return format_bytes(value)
    if key.endswith("_ms"):
        return format_ms(value)
    if key.endswith("_s") or key in SECONDS:
        return format_ms(value * 1e3)
    if key.endswith("_tokens") or key in TOKENS:
        return f"{value:,} tokens"
    if key in RATES:
        return f"{value:g} requests/s"
    if key in ("seed", "port"):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"
