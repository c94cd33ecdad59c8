"""Bring what the chart says of Baton's settings up to date: `python tools/gen_chart.py` after a change of a
setting or of `values.yaml`. `--check` changes nothing and ends with 1 where something is out of date.

In `helm/baton/values.schema.json` the definitions of `GENERATED` come from the services' own settings, the
rest is kept by hand; in `helm/baton/README.md` the table of values comes from the comments in `values.yaml`.
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from baton.runtime.config.config_base import Config, settings_of
from baton.runtime.config.settings import FleetConfig, GatewayConfig, SchedulerConfig, WorkerConfig

CHART = Path(__file__).parents[1] / "helm" / "baton"
SERVICES: Mapping[str, type[Config]] = {"gateway": GatewayConfig, "scheduler": SchedulerConfig, "fleet": FleetConfig}
OURS = frozenset(
    """advertise_host api_keys front_tls_cert front_tls_key log_dir ray_address redis_url schedulers tls_ca tls_cert tls_key
    prefill decode hybrid ray_placement worker_start_s follow_places""".split()
)
"""What the chart itself sets; `templates/_config.tpl` and `_pod.tpl` say to what."""
NEEDED: Mapping[str, tuple[str, ...]] = {
    "gateway": ("http_port", "grpc_port", "admin_port", "drain_s"),
    "scheduler": ("rpc_port", "admin_port", "drain_s"),
    "fleet": ("admin_port", "kv_port_range", "drain_s", "lease_s"),
}
"""What templates read, so that it cannot be left out: ports are those of Services and policies, seconds
decide grace periods."""
OF_WORKERS = ("rpc_port", "admin_port")
"""Settings of a worker that its pod has, and not the fleet: `fleet/ray/worker_actor.py` says which may be."""
SHARED_BY_HAND = ("host",)
"""A setting of the listening services that has one value in a cluster."""
BEGIN, END = "<!-- values: written by tools/gen_chart.py -->", "<!-- end of values -->"


def definitions() -> dict[str, Any]:
    """The generated part of the schema: {definition: schema}."""
    of_service = {name: _schemas(cls) for name, cls in SERVICES.items()}
    count = Counter(name for schemas in of_service.values() for name in schemas)
    shared = {name: schema for schemas in of_service.values() for name, schema in schemas.items() if count[name] > 1}
    shared = {name: schema for name, schema in shared.items() if not any(name in needed for needed in NEEDED.values())}
    found = {"config": _object(shared, required=("model", *SHARED_BY_HAND))}
    for service, schemas in of_service.items():
        own = {
            name: _needed(schema) if name in NEEDED[service] else schema
            for name, schema in schemas.items()
            if name not in SHARED_BY_HAND
        }
        found[f"{service}Config"] = _object(own, required=NEEDED[service])
    worker = _schemas(WorkerConfig)
    found["workerConfig"] = _object({name: _needed(worker[name]) for name in OF_WORKERS}, required=OF_WORKERS)
    return found


def schema_text() -> str:
    """`values.schema.json` as it should be."""
    content = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    content["definitions"] |= definitions()
    return json.dumps(content, indent=2) + "\n"


def readme_text() -> str:
    """The chart's `README.md` as it should be."""
    text = (CHART / "README.md").read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    rows = "\n".join(f"| `{path}` | {_shown(default)} | {words} |" for path, default, words in described_values())
    return f"{before}{BEGIN}\n| value | default | what it is |\n| --- | --- | --- |\n{rows}\n{END}{after}"


def described_values() -> Iterator[tuple[str, Any, str]]:
    """(path, default, description) of each value that a `# --` comment describes."""
    text = (CHART / "values.yaml").read_text(encoding="utf-8")
    values = yaml.safe_load(text)
    path: list[tuple[int, str]] = []
    words: list[str] = []
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith("# -- "):
            words = [stripped.removeprefix("# -- ")]
        elif stripped.startswith("#"):
            if words:
                words.append(stripped.removeprefix("#").strip())
        elif match := re.match(r"( *)([\w-]+):", line):
            indent = len(match[1])
            path = [*(step for step in path if step[0] < indent), (indent, match[2])]
            if words:
                names = [name for _, name in path]
                yield ".".join(names), _at(values, names), " ".join(words)
            words = []
        else:
            words = []


def _schemas(cls: type[Config]) -> dict[str, Any]:
    return {item.name: item.schema() for item in settings_of(cls) if item.name not in OURS}


def _needed(schema: dict[str, Any]) -> dict[str, Any]:
    """The same without null, and for a port without 0, which would be a port that nobody knows."""
    variants = [variant for variant in schema.get("anyOf", [schema]) if variant.get("type") != "null"]
    shape = {"description": schema["description"]} | {
        key: value for key, value in variants[0].items() if key != "default"
    }
    if shape.get("maximum") == 65535:
        shape["minimum"] = 1
    if shape["type"] == "string":
        shape["pattern"] = r"^[0-9]+-[0-9]+$"
    return shape


def _object(properties: dict[str, Any], required: tuple[str, ...]) -> dict[str, Any]:
    ordered = {name: properties[name] for name in sorted(properties)}
    return {"type": "object", "additionalProperties": False, "required": list(required), "properties": ordered}


def _at(values: Any, names: list[str]) -> Any:
    for name in names:
        values = values[name]
    return values


def _shown(default: Any) -> str:
    if default in ("", {}, []):
        return ""
    return f"`{json.dumps(default)}`" if len(json.dumps(default)) <= 60 else "see the file"


def main() -> int:
    """Exit code 1 with `--check` where a file is out of date."""
    stale = 0
    for name, text in (("values.schema.json", schema_text()), ("README.md", readme_text())):
        file = CHART / name
        if file.read_text(encoding="utf-8") == text:
            continue
        stale += 1
        if "--check" in sys.argv[1:]:
            print(f"{file} is out of date: run `python tools/gen_chart.py`")
        else:
            file.write_text(text, encoding="utf-8")
            print(f"wrote {file}")
    return 1 if stale and "--check" in sys.argv[1:] else 0


if __name__ == "__main__":
    sys.exit(main())
