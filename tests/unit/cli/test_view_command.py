"""`baton view`: which address it opens."""

import pytest
from click.testing import CliRunner

from baton.cli import view_command
from baton.cli.admin.gateway_connection import AdminContext
from baton.core.errors import BatonError
from baton.runtime.process.run_file import RunningCluster


def cluster(view: str) -> RunningCluster:
    facts = {"cluster": "c", "model": "demo", "url": "http://h:1", "gateway": "h:2", "identity": "i"}
    return RunningCluster(pid=1, started_s=1.0, view=view, **facts)


def run(
    monkeypatch: pytest.MonkeyPatch, *arguments: str, clusters: tuple[RunningCluster, ...] = ()
) -> tuple[str, list[str]]:
    """Return the output and the opened addresses."""
    opened: list[str] = []
    monkeypatch.setattr(view_command.click, "launch", lambda url: opened.append(url) or 0)
    context = AdminContext(running_clusters=lambda: clusters)
    result = CliRunner().invoke(view_command.view, arguments, obj=context, catch_exceptions=False)
    return result.output, opened


def test_opens_the_newest_cluster_with_a_view(monkeypatch: pytest.MonkeyPatch) -> None:
    clusters = (cluster(""), cluster("http://h:8002/"), cluster("http://h:9/"))
    assert run(monkeypatch, clusters=clusters) == ("http://h:8002/\n", ["http://h:8002/"])
    assert run(monkeypatch, "--print", clusters=clusters) == ("http://h:8002/\n", [])
    assert run(monkeypatch, "--url", "http://other/") == ("http://other/\n", ["http://other/"])


def test_says_what_to_do_without_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BatonError, match="--url"):
        run(monkeypatch)
