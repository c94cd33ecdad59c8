"""The JSON-Schema-Test-Suite: its schemas, and values that they allow or forbid."""

import gzip
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

_PATH = Path(__file__).parent / "data" / "json_schema_test_suite" / "draft2020-12.jsonl.gz"


@dataclass(frozen=True)
class SuiteCase:
    """A schema with values that it allows, and values that it forbids."""

    file: str
    description: str
    schema: dict[str, Any]
    valid: tuple[Any, ...]
    invalid: tuple[Any, ...]


@cache
def suite() -> tuple[SuiteCase, ...]:
    """Return the cases whose schema is an object, in a fixed order."""
    cases = []
    with gzip.open(_PATH, "rt") as lines:
        for line in lines:
            case = json.loads(line)
            if isinstance(case["schema"], dict):
                values = [[test["data"] for test in case["tests"] if test["valid"] is valid] for valid in (True, False)]
                cases.append(
                    SuiteCase(case["file"], case["description"], case["schema"], tuple(values[0]), tuple(values[1]))
                )
    return tuple(cases)
