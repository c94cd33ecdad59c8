"""Four sets of values and all that they make, as text to look at in a review. `UPDATE_GOLDENS=1` writes them
anew."""

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
    """Sorted, so that it does not matter who rendered; without what is random, and without alerts and
    dashboards, which are files of their own."""
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
def test_what_is_rendered_is_what_was_reviewed(rendered: Rendered, name: str) -> None:
    file, text = HERE / f"{name}.yaml", golden_text(rendered(GOLDENS[name]))
    if os.environ.get("UPDATE_GOLDENS") == "1":
        file.write_text(text, encoding="utf-8")

    assert text == file.read_text(encoding="utf-8"), "look at the difference; UPDATE_GOLDENS=1 takes it over"
