"""Renders the chart with Helm itself: its Go SDK, which the package `helm-python-sdk` contains as a library.

The package has wheels for some platforms only. Elsewhere, tests of the chart are skipped.
"""

import importlib
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeAlias

import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "baton"
RELEASE, NAMESPACE = "rel", "serving"
NOTES = "templates/NOTES.txt"

Doc: TypeAlias = dict[str, Any]


class RenderError(Exception):
    """Helm refused the values. The message is the one that a user would see."""

    def mentions(self, words: str) -> bool:
        """Return True if the message contains these words. A path in it may use dots or slashes."""
        return words in str(self) or words in str(self).replace("/", ".")


class Renderer:
    """Renders the chart without a cluster. All methods raise RenderError."""

    def __init__(self, helm: Any) -> None:
        """`helm`: the module of the package."""
        self._helm = helm

    def text(self, values: Mapping[str, Any], **options: Any) -> str:
        """Return everything that is sent to Kubernetes, as YAML. Options as in `templates`."""
        return _joined(self.templates(values, **options))

    def docs(self, values: Mapping[str, Any], **options: Any) -> tuple[Doc, ...]:
        """Return the objects that are sent to Kubernetes. Options as in `templates`."""
        return parse(self.text(values, **options))

    def notes(self, values: Mapping[str, Any], **options: Any) -> str:
        """Return the text that `helm install` prints. Options as in `templates`."""
        return next(text for path, text in self.templates(values, **options).items() if path.endswith(NOTES))

    def templates(
        self,
        values: Mapping[str, Any],
        *,
        files: Sequence[Path] = (),
        chart: Path = CHART,
        namespace: str = NAMESPACE,
    ) -> dict[str, str]:
        """Render an install. Return the text of each template by its path.

        files: values files. Later files take precedence, and `values` over all of them.
        """
        with self._loaded(chart) as loaded:
            rendered: dict[str, str] = loaded.render(
                _merged_files(values, files), name=RELEASE, namespace=namespace, is_install=True
            )
            return rendered

    def upgrade_docs(self, values: Mapping[str, Any], existing: Sequence[Doc]) -> tuple[Doc, ...]:
        """Return the objects of an upgrade in a cluster where `lookup` finds the existing Secrets."""
        with api_server(existing) as kubeconfig, self._loaded(CHART) as loaded:
            config = self._helm.Config(kubeconfig_content=kubeconfig, namespace=NAMESPACE)
            with config:
                rendered = config.render(
                    loaded, _plain(values), name=RELEASE, namespace=NAMESPACE, is_install=False, is_upgrade=True
                )
        return parse(_joined(rendered))

    @contextmanager
    def _loaded(self, chart: Path) -> Iterator[Any]:
        try:
            with self._helm.Chart.load(chart) as loaded:
                yield loaded
        except self._helm.HelmError as error:
            raise RenderError(str(error)) from error


def parse(text: str) -> tuple[Doc, ...]:
    """Return the objects in a stream of YAML documents."""
    return tuple(doc for doc in yaml.load_all(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)) if doc)


@cache
def find() -> Renderer | str:
    """Return the renderer, or the reason why there is none."""
    try:
        return Renderer(importlib.import_module("helm_python"))
    except ImportError as error:
        return f"helm: helm-python-sdk cannot be used on this machine: {error}"


@contextmanager
def api_server(secrets: Sequence[Doc]) -> Iterator[str]:
    """Serve these Secrets as a Kubernetes API server does. Yields a kubeconfig."""
    paths = {f"/api/v1/namespaces/{s['metadata']['namespace']}/secrets/{s['metadata']['name']}": s for s in secrets}
    resource = {"name": "secrets", "singularName": "secret", "namespaced": True, "kind": "Secret", "verbs": ["get"]}
    paths["/api/v1"] = {"kind": "APIResourceList", "groupVersion": "v1", "resources": [resource]}
    not_found = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = paths.get(self.path.partition("?")[0])
            body = json.dumps(found or not_found).encode()
            self.send_response(200 if found else 404)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Keep the output of the tests clean."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    cluster = {"name": "test", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}
    context = {"name": "test", "context": {"cluster": "test", "user": ""}}
    config = {"apiVersion": "v1", "kind": "Config", "clusters": [cluster], "contexts": [context]}
    try:
        yield json.dumps({**config, "current-context": "test"})
    finally:
        server.shutdown()
        server.server_close()


def _joined(templates: Mapping[str, str]) -> str:
    return "\n---\n".join(text for path, text in sorted(templates.items()) if not path.endswith(NOTES))


def _merged_files(values: Mapping[str, Any], files: Sequence[Path]) -> Any:
    """Merge values files and values as `helm -f` does. Null stays, because Helm removes defaults with it."""
    merged: Any = {}
    for layer in (*(yaml.safe_load(file.read_text(encoding="utf-8")) for file in files), _plain(values)):
        merged = _merged(merged, layer)
    return merged


def _merged(below: Any, above: Any) -> Any:
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    return {**below, **{name: _merged(below.get(name), value) for name, value in above.items()}}


def _plain(values: Mapping[str, Any]) -> Any:
    """Convert mappings and tuples to the types of JSON."""
    return json.loads(json.dumps(values, default=dict))
