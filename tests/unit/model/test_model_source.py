"""Tests how `--model` is resolved; the hub itself is not contacted."""

from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import pytest
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from baton.core.errors import ModelError
from baton.model.loading.model_source import DEMO_DIR, resolve_model


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, str | None]]:
    """Return the list of downloads, as (id, revision)."""
    calls: list[tuple[str, str | None]] = []

    def download(repo_id: str, *, revision: str | None, **_: Any) -> str:
        calls.append((repo_id, revision))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return calls


def test_demo_and_directories_are_resolved_locally(
    tmp_path: Path, asked: list[tuple[str, str | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert resolve_model("demo") == DEMO_DIR
    assert (DEMO_DIR / "config.json").is_file()
    assert resolve_model(str(tmp_path)) == tmp_path
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    # a local directory takes precedence over the hub
    assert resolve_model("owner/name") == tmp_path / "owner" / "name"
    assert asked == []


def test_hub_ids_are_downloaded(tmp_path: Path, asked: list[tuple[str, str | None]]) -> None:
    assert resolve_model("Qwen/Qwen3-0.6B") == tmp_path
    resolve_model("gpt2@refs/pr/3")
    resolve_model("owner/na.me_1@0123abc")
    assert asked == [("Qwen/Qwen3-0.6B", None), ("gpt2", "refs/pr/3"), ("owner/na.me_1", "0123abc")]


def test_weights_false_downloads_no_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    expected: list[list[str]] = []

    def download(repo_id: str, *, allow_patterns: list[str], **_: Any) -> str:
        expected.append(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    resolve_model("owner/name")
    resolve_model("owner/name", weights=False)
    assert expected == [["*.json", "*.jinja", "model*.safetensors"], ["*.json", "*.jinja"]]


@pytest.mark.parametrize(
    "model", ["/no/such/dir", "./missing", "~/missing", "a/b/c", "", "http://host/x", "owner/name@"]
)
def test_neither_directory_nor_hub_id_is_refused(model: str, asked: list[tuple[str, str | None]]) -> None:
    with pytest.raises(ModelError, match="no such directory"):
        resolve_model(model)
    assert asked == []


def test_a_file_is_refused(
    tmp_path: Path, asked: list[tuple[str, str | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.gguf").write_text("")
    with pytest.raises(ModelError, match="no such directory"):
        resolve_model("model.gguf")


def response(status: int) -> httpx.Response:
    return httpx.Response(status, request=httpx.Request("GET", "https://example.invalid"))


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (GatedRepoError("gated", response=response(403)), "accept its licence"),
        (RepositoryNotFoundError("missing", response=response(404)), "check the spelling"),
        (RevisionNotFoundError("missing", response=response(404)), "no revision 'rev'"),
        (LocalEntryNotFoundError("offline"), "cannot be reached"),
        (httpx.ConnectError("refused"), "check the network"),
        (OSError("disk full"), "disk full"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_hub_errors_name_the_remedy(error: Exception, advice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ModelError, match=advice) as raised:
        resolve_model("owner/name@rev")
    assert raised.value.__cause__ is error
