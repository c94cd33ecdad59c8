"""Resolves a rendered pod into commands, environment, files and memory, including all references."""

import base64
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.deploy.objects import bytes_of, named
from tests.deploy.renderer import ROOT, Doc

CONFIG_MODE = 0o644
_REFERENCE = re.compile(r"\$\$|\$\(([A-Za-z_][A-Za-z0-9_]*)\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """A ConfigMap or Secret mounted as a directory."""

    path: str
    contents: Mapping[str, bytes]
    mode: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Scratch:
    """An empty directory of the pod with a size limit."""

    path: str
    max_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """One container of a pod. Probes are as rendered, with port numbers; None if absent."""

    name: str
    argv: tuple[str, ...]
    environ: Mapping[str, str]
    startup: Mapping[str, Any] | None
    readiness: Mapping[str, Any] | None
    liveness: Mapping[str, Any] | None
    pre_stop: tuple[str, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """A pod. `sidecars` start before `containers` and end after them."""

    name: str
    address: str
    labels: Mapping[str, str]
    sidecars: tuple[Container, ...]
    containers: tuple[Container, ...]
    volumes: tuple[Files | Scratch, ...]
    user: int
    group: int
    grace_s: float
    shares_processes: bool


def pod_of(template: Mapping[str, Any], docs: Sequence[Doc], *, name: str, address: str) -> Pod:
    """Create the pod of a template.

    Raises KeyError if a referenced object or key is missing, ValueError for unsupported fields.
    """
    spec = template["spec"]
    sidecars = spec.get("initContainers", ())
    if any(container.get("restartPolicy") != "Always" for container in sidecars):
        raise ValueError("containers that end before the others start cannot be rehearsed")
    context = spec["securityContext"]
    containers = (*sidecars, *spec["containers"])
    return Pod(
        name=name,
        address=address,
        labels=template["metadata"]["labels"],
        sidecars=tuple(_container(container, docs, name, address) for container in sidecars),
        containers=tuple(_container(container, docs, name, address) for container in spec["containers"]),
        volumes=tuple(_volumes(spec.get("volumes", ()), containers, docs)),
        user=context["runAsUser"],
        group=context["fsGroup"],
        grace_s=spec["terminationGracePeriodSeconds"],
        shares_processes=spec.get("shareProcessNamespace", False),
    )


def image_environ() -> dict[str, str]:
    """Return the environment that the image sets: ENV of the Dockerfile's base stage."""
    text = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
    base = text[text.index(" AS base") : text.index(" AS build")]
    (block,) = re.findall(r"^ENV ((?:.*\\\n)*.*)$", base, re.MULTILINE)
    return dict(word.split("=", 1) for word in shlex.split(block.replace("\\\n", " ")))


def secret(docs: Iterable[Doc], name: str) -> dict[str, bytes]:
    """Return the content of a Secret."""
    doc = _named(docs, "Secret", name)
    plain = {key: value.encode() for key, value in doc.get("stringData", {}).items()}
    return {key: base64.b64decode(value) for key, value in doc.get("data", {}).items()} | plain


def _named(docs: Iterable[Doc], kind: str, name: str) -> Doc:
    try:
        return named(docs, kind, name)
    except StopIteration:
        raise KeyError(f"there is no {kind} {name}") from None


def _container(container: Mapping[str, Any], docs: Sequence[Doc], pod_name: str, pod_address: str) -> Container:
    own: dict[str, str] = {}
    for variable in container.get("env", ()):
        own[variable["name"]] = _value(variable, own, docs, {"status.podIP": pod_address, "metadata.name": pod_name})
    environ = {**image_environ(), **own}
    ports = {port["name"]: port["containerPort"] for port in container.get("ports", ())}
    hook = container.get("lifecycle", {}).get("preStop")
    return Container(
        name=container["name"],
        argv=tuple(_expand(word, own) for word in (*container["command"], *container.get("args", ()))),
        environ=environ,
        startup=_probe(container.get("startupProbe"), ports),
        readiness=_probe(container.get("readinessProbe"), ports),
        liveness=_probe(container.get("livenessProbe"), ports),
        pre_stop=tuple(hook["exec"]["command"]) if hook else None,
    )


def _value(
    variable: Mapping[str, Any], before: Mapping[str, str], docs: Sequence[Doc], fields: Mapping[str, str]
) -> str:
    if "valueFrom" not in variable:
        return _expand(str(variable.get("value", "")), before)
    ((kind, reference),) = variable["valueFrom"].items()
    if kind == "fieldRef":
        return fields[reference["fieldPath"]]
    if kind == "secretKeyRef":
        return secret(docs, reference["name"])[reference["key"]].decode()
    raise ValueError(f"{variable['name']}: {kind} cannot be rehearsed")


def _expand(text: str, environ: Mapping[str, str]) -> str:
    """Expand variables as Kubernetes does: unknown ones stay, and `$$` is a dollar sign."""
    return _REFERENCE.sub(lambda found: "$" if found[0] == "$$" else environ.get(found[1], found[0]), text)


def _probe(probe: Mapping[str, Any] | None, ports: Mapping[str, int]) -> Mapping[str, Any] | None:
    """Replace port names with numbers."""
    if probe is None:
        return None
    return {
        kind: {**value, "port": ports.get(value["port"], value["port"])}
        if isinstance(value, Mapping) and "port" in value
        else value
        for kind, value in probe.items()
    }


def _volumes(
    volumes: Iterable[Mapping[str, Any]], containers: Iterable[Mapping[str, Any]], docs: Sequence[Doc]
) -> Iterator[Files | Scratch]:
    """Return the volumes by path. All containers see all of them: no pod of the chart has two at one path."""
    mounts = {(mount["name"], mount["mountPath"]) for container in containers for mount in container["volumeMounts"]}
    paths = {path: name for name, path in mounts}
    if len(paths) != len(mounts):
        raise ValueError(f"two volumes at one path cannot be rehearsed: {sorted(mounts)}")
    by_name = {volume["name"]: volume for volume in volumes}
    for path in sorted(paths):
        volume = by_name[paths[path]]
        if "emptyDir" in volume:
            yield Scratch(path=path, max_bytes=int(bytes_of(volume["emptyDir"]["sizeLimit"])))
        elif "configMap" in volume:
            data = _named(docs, "ConfigMap", volume["configMap"]["name"])["data"]
            contents = {key: text.encode() for key, text in data.items()}
            yield Files(path=path, contents=_items(volume["configMap"], contents), mode=CONFIG_MODE)
        elif "secret" in volume:
            own = volume["secret"]
            yield Files(
                path=path,
                contents=_items(own, secret(docs, own["secretName"])),
                mode=own.get("defaultMode", CONFIG_MODE),
            )
        else:
            raise ValueError(f"volume {volume['name']} cannot be rehearsed")


def _items(source: Mapping[str, Any], contents: Mapping[str, bytes]) -> Mapping[str, bytes]:
    if "items" not in source:
        return contents
    return {item["path"]: contents[item["key"]] for item in source["items"]}
