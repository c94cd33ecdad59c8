"""Settings and files are checked before `baton up` starts a process."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from baton.core.errors import BatonError, ConfigError
from baton.fleet import up
from baton.fleet.preflight import check_before_start, check_model
from baton.model.loading.model_source import resolve_model
from baton.runtime.config.settings import ClusterConfig
from baton.runtime.process.process import Stop
from tests.certificates import Authority


async def problem_of(**settings: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        await check_before_start(ClusterConfig(**settings))
    return str(raised.value)


async def test_default_settings_pass() -> None:
    await check_before_start(ClusterConfig())


async def test_key_file_must_exist_and_be_valid(tmp_path: Path) -> None:
    assert "missing.yaml" in await problem_of(api_keys=tmp_path / "missing.yaml")
    (tmp_path / "bad.yaml").write_text("keys: 7\n")
    assert "bad.yaml" in await problem_of(api_keys=tmp_path / "bad.yaml")


async def test_certificate_of_the_front_door_must_be_readable(tmp_path: Path) -> None:
    pair = Authority.new(tmp_path / "a").pair("front", "h")
    assert "no.pem" in await problem_of(front_tls_cert=tmp_path / "no.pem", front_tls_key=pair.key)


async def test_service_certificate_must_be_signed_valid_and_named(tmp_path: Path) -> None:
    ours, other = Authority.new(tmp_path / "ours"), Authority.new(tmp_path / "other")
    ended = datetime.now(UTC) - timedelta(days=1)

    def settings(file: str, name: str, authority: Authority, **changes: Any) -> dict[str, Path]:
        pair = ours.pair(file, name, **changes)
        return {"tls_cert": pair.certificate, "tls_key": pair.key, "tls_ca": authority.file}

    await check_before_start(ClusterConfig(**settings("good", "baton.internal", ours)))
    assert "not signed by" in await problem_of(**settings("good", "baton.internal", other))
    assert "not valid now" in await problem_of(**settings("old", "baton.internal", ours, ends=ended))
    assert "must contain the name baton.internal" in await problem_of(**settings("else", "example", ours))
    assert "contains no CA" in await problem_of(
        **{**settings("good", "baton.internal", ours), "tls_ca": ours.directory / "good.key"}
    )


async def test_kv_memory_must_be_free() -> None:
    assert "are free" in await problem_of(kv_memory=2**50, device="cpu")


def test_kv_memory_must_hold_one_sequence_of_the_model() -> None:
    demo = Path(resolve_model("demo"))
    check_model(ClusterConfig(kv_memory=64 * 2**20), demo)
    with pytest.raises(
        ConfigError, match=r"--kv-memory 1MiB holds the KV of 336 tokens; must hold one sequence of 16384"
    ):
        check_model(ClusterConfig(kv_memory=2**20), demo)
    check_model(ClusterConfig(kv_memory=2**20, max_model_len=256), demo)
    with pytest.raises(BatonError, match="--max-model-len is 99999; must be at most 16384"):
        check_model(ClusterConfig(max_model_len=99_999), demo)


def test_model_whose_values_are_defaults_of_transformers_is_left_to_the_workers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    check_model(ClusterConfig(kv_memory=1), tmp_path)
    check_model(ClusterConfig(kv_memory=1), tmp_path / "missing")


async def test_nothing_is_started_if_a_check_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start() -> None:
        raise AssertionError("the run directory and its reaper process were created")

    monkeypatch.setattr(up, "RunDir", start)
    monkeypatch.setattr(up.logging, "configure", lambda *_, **__: None)
    config = ClusterConfig(api_keys=tmp_path / "keys.yaml", log_dir=tmp_path)
    with pytest.raises(ConfigError, match="cannot read the API key file"):
        await up.up(config, Stop(), lambda line: None)
