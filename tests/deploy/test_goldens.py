"""Objects of four sets of values, as text for code review.

`UPDATE_GOLDENS=1 pytest THIS_FILE` rewrites them.
"""

import os
from collections.abc import Iterable
from pathlib import Path

import pytest
import yaml

from tests.deploy.conftest import Rendered
from tests.deploy.renderer import Doc
from tests.deploy.value_sets import GOLDENS

HERE = Path(__file__).parent / "goldens"
GENERATED = "(generated)"


def golden_text(docs: Iterable[Doc]) -> str:
    """Return the objects as sorted YAML, without random values, alerts and dashboards."""
    kept = [doc for doc in docs if doc["kind"] != "PrometheusRule" and "-dashboard-" not in doc["metadata"]["name"]]
    ordered = sorted(kept, key=lambda doc: (doc["kind"], doc["metadata"]["name"]))
    return yaml.dump_all((_without_secrets(doc) for doc in ordered), Dumper=yaml.CSafeDumper, sort_keys=True, width=140)


def _without_secrets(doc: Doc) -> Doc:
    if doc["kind"] != "Secret":
        return doc
    return {
        key: dict.fromkeys(value, GENERATED) if key in ("data", "stringData") else value for key, value in doc.items()
    }


@pytest.mark.parametrize("name", GOLDENS)
def test_rendered_objects_equal_the_golden_file(rendered: Rendered, name: str) -> None:
    file, text = HERE / f"{name}.yaml", golden_text(rendered(GOLDENS[name]))
    if os.environ.get("UPDATE_GOLDENS") == "1":
        file.write_text(text, encoding="utf-8")

    assert text == file.read_text(encoding="utf-8"), "review the difference; UPDATE_GOLDENS=1 accepts it"
