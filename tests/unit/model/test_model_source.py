"""Tests how `--model` is resolved; the hub itself is not contacted."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from huggingface_hub.errors import (
    DryRunError,
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import filter_repo_objects

from baton.core.errors import ModelError
from baton.model.loading.model_source import DEMO_DIR, resolve_model


class Hub:
    """Records downloads as (id, revision), and the file patterns of each."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.is_offline = False
        self.asked: list[tuple[str, str | None]] = []
        self.patterns: list[list[str]] = []

    def download(
        self, repo_id: str, *, revision: str | None, allow_patterns: list[str], dry_run: bool = False
    ) -> str | list[SimpleNamespace]:
        if dry_run and self.is_offline:
            raise DryRunError("offline")
        if dry_run:
            names = filter_repo_objects(self.files(), allow_patterns=allow_patterns)
            return [SimpleNamespace(filename=name) for name in names]
        self.asked.append((repo_id, revision))
        self.patterns.append(allow_patterns)
        return str(self._directory)

    def files(self) -> list[str]:
        return [str(path.relative_to(self._directory)) for path in self._directory.rglob("*") if path.is_file()]


@pytest.fixture
def hub(tmp_path: Path) -> Hub:
    return Hub(tmp_path)


def test_demo_and_directories_are_resolved_locally(tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_model("demo", download=hub.download) == DEMO_DIR
    assert (DEMO_DIR / "config.json").is_file()
    assert resolve_model(str(tmp_path), download=hub.download) == tmp_path
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    # a local directory takes precedence over the hub
    assert resolve_model("owner/name", download=hub.download) == tmp_path / "owner" / "name"
    assert hub.asked == []


def test_hub_ids_are_downloaded(tmp_path: Path, hub: Hub) -> None:
    assert resolve_model("Qwen/Qwen3-0.6B", download=hub.download) == tmp_path
    resolve_model("gpt2@refs/pr/3", download=hub.download)
    resolve_model("owner/na.me_1@0123abc", download=hub.download)
    assert hub.asked == [("Qwen/Qwen3-0.6B", None), ("gpt2", "refs/pr/3"), ("owner/na.me_1", "0123abc")]


def test_weights_false_downloads_no_weights(hub: Hub) -> None:
    resolve_model("owner/name", download=hub.download)
    resolve_model("owner/name", weights=False, download=hub.download)
    assert hub.patterns == [["*.json", "*.jinja", "model*.safetensors"], ["*.json", "*.jinja"]]


@pytest.mark.parametrize(
    "model",
    [
        *("/no/such/dir", "./missing", "~/missing", "a/b/c", "", "http://host/x", "owner/name@", "owner/name:"),
        *("missing.gguf", "owner/missing.GGUF"),
    ],
)
def test_neither_directory_nor_hub_id_is_refused(model: str, hub: Hub) -> None:
    with pytest.raises(ModelError, match="no such directory"):
        resolve_model(model, download=hub.download)
    assert hub.asked == []


def test_a_file_is_refused(tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.gguf").write_text("")
    with pytest.raises(ModelError, match="no such directory"):
        resolve_model("model.gguf", download=hub.download)
    assert hub.asked == []


@pytest.fixture
def gguf_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A downloaded repository of GGUF files, two of them parts of one model. They are not converted."""
    monkeypatch.setattr("baton.model.loading.model_source.gguf_directory", lambda path: path)
    quantised = (f"a-{name}.gguf" for name in ("Q8_0", "Q4_K_M", "Q4_K_S", "Q6_K", "Q6_K_L", "IQ4_XS"))
    names = (*quantised, "mmproj-a-Q8_0.gguf", "config.json")
    (tmp_path / "BF16").mkdir()
    for name in (*names, *BF16):
        (tmp_path / name).touch()
    return tmp_path


BF16 = [f"BF16/a-BF16-{number:05d}-of-00002.gguf" for number in (1, 2)]


@pytest.mark.parametrize("is_offline", [False, True])
@pytest.mark.parametrize(
    ("name", "files"),
    [
        *(("q8_0", ["a-Q8_0.gguf"]), ("BF16", BF16), ("Q6_K", ["a-Q6_K.gguf"]), ("Q6_K_", ["a-Q6_K_L.gguf"])),
        *(("a-Q4_K_M", ["a-Q4_K_M.gguf"]), ("IQ4", ["a-IQ4_XS.gguf"])),
    ],
)
def test_only_the_named_gguf_model_of_the_hub_is_downloaded(
    name: str, files: list[str], is_offline: bool, gguf_files: Path, hub: Hub
) -> None:
    hub.is_offline = is_offline
    assert resolve_model(f"owner/name-GGUF@rev:{name}", download=hub.download) == gguf_files / files[0]
    assert hub.asked == [("owner/name-GGUF", "rev")] * (1 + is_offline)
    assert hub.patterns == [*([[]] if is_offline else []), files]  # with no pattern only the cache's folder is found


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("Q4_K", r"2 have. The repository has: a-Q4_K_M.gguf, a-Q4_K_S.gguf"),
        ("Q5_K", r"0 have. The repository has: BF16/a-BF16-00001-of-00002.gguf, a-IQ4_XS.gguf, a-Q4_K_M.gguf"),
    ],
)
@pytest.mark.usefixtures("gguf_files")
def test_an_ambiguous_name_of_a_gguf_file_is_refused_before_the_download(name: str, found: str, hub: Hub) -> None:
    with pytest.raises(ModelError, match=rf"{found}.*Give more of the name"):
        resolve_model(f"owner/name:{name}", download=hub.download)
    assert hub.asked == []


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
def test_hub_errors_name_the_remedy(error: Exception, advice: str) -> None:
    def download(*_: Any, **__: Any) -> str:
        raise error

    with pytest.raises(ModelError, match=advice) as raised:
        resolve_model("owner/name@rev", download=download)
    assert raised.value.__cause__ is error
