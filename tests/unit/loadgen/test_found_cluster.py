"""Options of loadgen with a cluster of this user: which one is meant, and who gets its key."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.runtime.process.process_identity import process_identity
from baton.runtime.process.run_file import RunningCluster, write_run_file
from loadgen.commands import target_options

OURS = {"url": "http://127.0.0.1:7000", "gateway": "127.0.0.1:7001"}


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningCluster]:
    monkeypatch.setenv("BATON_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("BATON_API_KEY", "of-baton")
    monkeypatch.setenv("OPENAI_API_KEY", "of-openai")
    identity = process_identity(os.getpid())
    cluster = RunningCluster(pid=os.getpid(), identity=identity, started_s=1.0, cluster="c", model="demo", **OURS)
    write_run_file(cluster, [tmp_path])
    target_options._newest_cluster.cache_clear()
    yield cluster
    target_options._newest_cluster.cache_clear()


def sent_key(*urls: str, gateway: str | None = None, api_key: str | None = None) -> str:
    given: dict[str, Any] = {"urls": urls, "gateway": gateway, "headers": (), "api_key": api_key}
    return target_options.headers_of(given, target_options._cluster_of(given))["Authorization"]


@pytest.mark.usefixtures("running")
def test_key_of_baton_is_sent_to_the_users_own_cluster_only() -> None:
    for ours in ((), ("http://localhost:7000",), ("127.0.0.1:7001",), ("http://127.0.0.1:7000", "127.0.0.1:7001")):
        assert sent_key(*ours) == "Bearer of-baton"
    for others in (("http://other:8000",), ("http://127.0.0.1:7000", "http://other:8000")):
        assert sent_key(*others) == "Bearer of-openai"
    assert sent_key("http://127.0.0.1:7000", gateway="other:8001") == "Bearer of-openai"
    assert sent_key(api_key="given") == "Bearer given"
