"""Update the parts of the Helm chart that are generated from settings and from `values.yaml`.

    python tools/gen_chart.py            write them; run it after a change of a setting or of values.yaml
    python tools/gen_chart.py --check    change nothing; exit 1 if a file is stale

In `helm/baton/values.schema.json`, the definitions of `definitions()` are generated from the services'
settings and the rest is written by hand. In `helm/baton/README.md`, the table of values is generated from the
comments in `values.yaml`.
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
SET_BY_CHART = frozenset(
    """advertise_host api_keys front_tls_cert front_tls_key log_dir ray_address redis_url schedulers tls_ca tls_cert
    tls_key prefill decode hybrid ray_placement worker_start_s scale_with_nodes""".split()
)
"""Settings that the templates `_config.tpl` and `_pod.tpl` set, so that values must not contain them."""
REQUIRED: Mapping[str, tuple[str, ...]] = {
    "gateway": ("http_port", "grpc_port", "admin_port", "drain_s"),
    "scheduler": ("rpc_port", "admin_port", "drain_s"),
    "fleet": ("admin_port", "kv_port_range", "drain_s", "lease_s"),
}
"""Settings that templates read, so that values must contain them: ports for Services and network policies,
and times for grace periods."""
OF_WORKERS = ("rpc_port", "admin_port")
"""Settings of a worker that its pod sets instead of the fleet; see `fleet/ray/worker_actor.py`."""
SHARED_BY_HAND = ("host",)
"""Setting of the listening services that has one value per cluster."""
BEGIN, END = "<!-- values: written by tools/gen_chart.py -->", "<!-- end of values -->"


def definitions() -> dict[str, Any]:
    """Return the generated definitions of the schema by name."""
    of_service = {name: _schemas(cls) for name, cls in SERVICES.items()}
    count = Counter(name for schemas in of_service.values() for name in schemas)
    shared = {name: schema for schemas in of_service.values() for name, schema in schemas.items() if count[name] > 1}
    shared = {
        name: schema for name, schema in shared.items() if not any(name in required for required in REQUIRED.values())
    }
    found = {"config": _object(shared, required=("model", *SHARED_BY_HAND))}
    for service, schemas in of_service.items():
        own = {
            name: _required(schema) if name in REQUIRED[service] else schema
            for name, schema in schemas.items()
            if name not in SHARED_BY_HAND
        }
        found[f"{service}Config"] = _object(own, required=REQUIRED[service])
    worker = _schemas(WorkerConfig)
    found["workerConfig"] = _object({name: _required(worker[name]) for name in OF_WORKERS}, required=OF_WORKERS)
    return found


def schema_text() -> str:
    """Return the up-to-date content of `values.schema.json`."""
    content = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    content["definitions"] |= definitions()
    return json.dumps(content, indent=2) + "\n"


def readme_text() -> str:
    """Return the up-to-date content of the chart's `README.md`."""
    text = (CHART / "README.md").read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    rows = "\n".join(f"| `{path}` | {_shown(default)} | {words} |" for path, default, words in described_values())
    return f"{before}{BEGIN}\n| value | default | description |\n| --- | --- | --- |\n{rows}\n{END}{after}"


def described_values() -> Iterator[tuple[str, Any, str]]:
    """Yield (path, default, description) of each value that a `# --` comment describes."""
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
    """Schemas by key of the settings that values may contain, with their deprecated names."""
    allowed = [item for item in settings_of(cls) if item.name not in SET_BY_CHART]
    return {
        key: schema for item in allowed for key, schema in {item.name: item.schema(), **item.alias_schemas()}.items()
    }


def _required(schema: dict[str, Any]) -> dict[str, Any]:
    """Remove null from a schema, and 0 from a port's, because templates must know the port."""
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
    """Write stale files, or with `--check` report them and return 1."""
    stale = 0
    for name, text in (("values.schema.json", schema_text()), ("README.md", readme_text())):
        file = CHART / name
        if file.read_text(encoding="utf-8") == text:
            continue
        stale += 1
        if "--check" in sys.argv[1:]:
            print(f"{file} is stale; run `python tools/gen_chart.py`")
        else:
            file.write_text(text, encoding="utf-8")
            print(f"wrote {file}")
    return 1 if stale and "--check" in sys.argv[1:] else 0


if __name__ == "__main__":
    sys.exit(main())
