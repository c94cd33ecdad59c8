"""`baton view`: which address it opens."""

from dataclasses import replace

import pytest
from click.testing import CliRunner, Result

from baton.cli import view_command
from baton.cli.admin.gateway_connection import AdminContext
from baton.core.errors import BatonError
from baton.runtime.process.run_file import RunningCluster


def cluster(port: int) -> RunningCluster:
    facts = {"cluster": "c", "model": "demo", "identity": "i", "url": f"http://127.0.0.1:{port}"}
    facts |= {"gateway": f"127.0.0.1:{port + 1}", "view": f"http://127.0.0.1:{port + 2}/"}
    return RunningCluster(pid=1, started_s=1.0, **facts)  # type: ignore[arg-type]


NEW, OLD = cluster(8000), cluster(9000)


def run(
    monkeypatch: pytest.MonkeyPatch, *arguments: str, clusters: tuple[RunningCluster, ...] = (NEW,), opens: bool = True
) -> tuple[Result, list[str]]:
    """Return the result and the opened addresses."""
    opened: list[str] = []
    monkeypatch.setattr(view_command.webbrowser, "open", lambda url: opened.append(url) or opens)
    context = AdminContext(running_clusters=lambda: clusters)
    return CliRunner().invoke(view_command.view, arguments, obj=context, catch_exceptions=False), opened


def test_opens_the_view_of_the_running_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    result, opened = run(monkeypatch)
    assert (result.stdout, result.stderr, opened) == ("http://127.0.0.1:8002/\n", "", ["http://127.0.0.1:8002/"])
    result, opened = run(monkeypatch, "--print")
    assert (result.stdout, opened) == ("http://127.0.0.1:8002/\n", [])


def test_opens_the_newest_of_several_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    result, opened = run(monkeypatch, clusters=(NEW, OLD))
    assert opened == ["http://127.0.0.1:8002/"]
    assert "this is the newest, 127.0.0.1:8001. Choose with --gateway" in result.stderr


@pytest.mark.parametrize("named", [("--gateway", "localhost:9001"), ("--url", "http://localhost:9000/")])
def test_opens_the_cluster_that_is_named(monkeypatch: pytest.MonkeyPatch, named: tuple[str, str]) -> None:
    result, opened = run(monkeypatch, *named, clusters=(NEW, OLD))
    assert (result.stderr, opened) == ("", ["http://127.0.0.1:9002/"])


def test_says_that_no_browser_was_started(monkeypatch: pytest.MonkeyPatch) -> None:
    result, _ = run(monkeypatch, opens=False)
    assert "no browser could be started" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "clusters", "message"),
    [
        ((), (), "--admin-port"),
        (("--url", "nonsense"), (NEW,), "no `baton up` of this user serves nonsense here"),
        ((), (replace(NEW, view=""),), "no `baton up` of this user runs here"),
    ],
)
def test_says_what_to_do_without_a_cluster(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], clusters: tuple[RunningCluster, ...], message: str
) -> None:
    with pytest.raises(BatonError, match=message):
        run(monkeypatch, *arguments, clusters=clusters)


def test_gateway_and_url_exclude_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    result, opened = run(monkeypatch, "--gateway", "localhost:9001", "--url", "http://localhost:9000/")
    assert (result.exit_code, opened) == (2, [])
    assert "give either --gateway or --url" in result.stderr
