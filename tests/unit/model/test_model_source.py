"""Tests how `--model` is resolved; the hub itself is not contacted."""

from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from baton.core.errors import ModelError
from baton.model.loading.hub import Hub
from baton.model.loading.model_source import DEMO_DIR, resolve_model

BF16 = [f"BF16/a-BF16-{number:05d}-of-00002.gguf" for number in (1, 2)]
"""A model in two parts."""


class FakeClient:
    """Records downloads as (id, revision), and the file patterns of each."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.is_offline = False
        self.error: Exception | None = None
        self.asked: list[tuple[str, str | None]] = []
        self.patterns: list[list[str]] = []

    def snapshot_download(self, repo_id: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        if self.error is not None:
            raise self.error
        self.asked.append((repo_id, revision))
        self.patterns.append(allow_patterns)
        return str(self._directory)

    def model_info(self, repo_id: str, *, revision: str | None, timeout: float) -> SimpleNamespace:
        if self.is_offline:
            raise OfflineModeIsEnabled(f"{repo_id}@{revision}")
        files = (path for path in self._directory.rglob("*") if path.is_file())
        return SimpleNamespace(
            siblings=[SimpleNamespace(rfilename=str(path.relative_to(self._directory))) for path in files]
        )


@pytest.fixture
def client(tmp_path: Path) -> FakeClient:
    return FakeClient(tmp_path)


def test_demo_and_directories_are_resolved_locally(
    tmp_path: Path, client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert resolve_model("demo", hub=Hub(lambda: client)) == DEMO_DIR
    assert (DEMO_DIR / "config.json").is_file()
    assert resolve_model(str(tmp_path), hub=Hub(lambda: client)) == tmp_path
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    # a local directory takes precedence over the hub
    assert resolve_model("owner/name", hub=Hub(lambda: client)) == tmp_path / "owner" / "name"
    assert client.asked == []


def test_hub_ids_are_downloaded(tmp_path: Path, client: FakeClient) -> None:
    assert resolve_model("Qwen/Qwen3-0.6B", hub=Hub(lambda: client)) == tmp_path
    resolve_model("gpt2@refs/pr/3", hub=Hub(lambda: client))
    resolve_model("owner/na.me_1@0123abc", hub=Hub(lambda: client))
    assert client.asked == [("Qwen/Qwen3-0.6B", None), ("gpt2", "refs/pr/3"), ("owner/na.me_1", "0123abc")]


def test_weights_false_downloads_no_weights(client: FakeClient) -> None:
    resolve_model("owner/name", hub=Hub(lambda: client))
    resolve_model("owner/name", weights=False, hub=Hub(lambda: client))
    assert client.patterns == [["*.json", "*.jinja", "model*.safetensors"], ["*.json", "*.jinja"]]


@pytest.mark.parametrize(
    "model",
    [
        *("/no/such/dir", "./missing", "~/missing", "a/b/c", "", "http://host/x", "owner/name@", "owner/name:"),
        *("missing.gguf", "owner/missing.GGUF"),
    ],
)
def test_neither_directory_nor_hub_id_is_refused(model: str, client: FakeClient) -> None:
    with pytest.raises(ModelError, match="no such directory"):
        resolve_model(model, hub=Hub(lambda: client))
    assert client.asked == []


def test_a_file_is_refused(tmp_path: Path, client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.gguf").write_text("")
    with pytest.raises(ModelError, match="no such directory"):
        resolve_model("model.gguf", hub=Hub(lambda: client))
    assert client.asked == []


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


WHOLE_NAMES = [("q8_0", ["a-Q8_0.gguf"]), ("BF16", BF16), ("Q6_K", ["a-Q6_K.gguf"]), ("a-Q4_K_M", ["a-Q4_K_M.gguf"])]
PARTS_OF_NAMES = [("Q6_K_", ["a-Q6_K_L.gguf"]), ("IQ4", ["a-IQ4_XS.gguf"]), ("00002-of", BF16)]


@pytest.mark.parametrize(
    ("name", "files", "is_offline"),
    [
        *((*each, False) for each in WHOLE_NAMES + PARTS_OF_NAMES),
        *((*each, True) for each in WHOLE_NAMES),
    ],
)
def test_only_the_named_gguf_model_of_the_hub_is_downloaded(
    name: str, files: list[str], is_offline: bool, gguf_files: Path, client: FakeClient
) -> None:
    client.is_offline = is_offline
    assert resolve_model(f"owner/name-GGUF@rev:{name}", hub=Hub(lambda: client)) == gguf_files / files[0]
    assert client.asked == [("owner/name-GGUF", "rev")] * (1 + is_offline)
    assert client.patterns == [*([[]] if is_offline else []), files]  # with no pattern only the cache's folder is found


@pytest.mark.usefixtures("gguf_files")
def test_without_the_hub_a_name_must_stand_alone(client: FakeClient) -> None:
    """A file of the repository that fits better may not be in the cache."""
    client.is_offline = True
    with pytest.raises(ModelError, match=r"0 have. The repository cannot be listed; its cache has: BF16/a-BF16-00001"):
        resolve_model("owner/name:Q6_K_", hub=Hub(lambda: client))
    assert client.patterns == [[]]


def test_names_of_gguf_files_are_no_patterns(
    tmp_path: Path, client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.model.loading.model_source.gguf_directory", lambda path: path)
    (tmp_path / "a[1]-Q8_0.gguf").touch()
    assert resolve_model("owner/name:Q8_0", hub=Hub(lambda: client)) == tmp_path / "a[1]-Q8_0.gguf"
    assert client.patterns == [["a[[]1]-Q8_0.gguf"]]


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("Q4_K", r"2 have. The repository has: a-Q4_K_M.gguf, a-Q4_K_S.gguf"),
        (
            "Q5_K",
            r"0 have. The repository has: BF16/a-BF16-00001-of-00002.gguf, a-IQ4_XS.gguf, a-Q4_K_M.gguf, .*, \.\.\.",
        ),
    ],
)
@pytest.mark.usefixtures("gguf_files")
def test_an_ambiguous_name_of_a_gguf_file_is_refused_before_the_download(
    name: str, found: str, client: FakeClient
) -> None:
    with pytest.raises(ModelError, match=rf"{found}.*Give more of the name"):
        resolve_model(f"owner/name:{name}", hub=Hub(lambda: client))
    assert client.asked == []


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
def test_hub_errors_name_the_remedy(error: Exception, advice: str, client: FakeClient) -> None:
    client.error = error
    with pytest.raises(ModelError, match=advice) as raised:
        resolve_model("owner/name@rev", hub=Hub(lambda: client))
    assert raised.value.__cause__ is error
