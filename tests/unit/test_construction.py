"""Objects are built in dependency order: no component gets a dependency after its construction."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMPONENTS = {
    "allocator",
    "backend",
    "engine",
    "engine_loop",
    "executor",
    "gateway",
    "jobs",
    "keeper",
    "membership",
    "network",
    "pool",
    "publisher",
    "reader",
    "reporter",
    "scheduler",
    "sessions",
}
"""Names under which code holds a component: an object with dependencies and tasks, not a data record."""

FOREIGN = {
    "config._attn_implementation",
    "member._value_",
    "options._devices",
    "options._threads",
    "options._timeout",
    "read.handle._released",
    "server._server",
    "timer._scheduled",
}
"""Attributes of other libraries, and of `enum`, that look private but are the only way to set a value."""

PRIVATE_OF_OTHERS = re.compile(r"(\.self|\.cls|(?<!\bself)(?<!\bcls))\._")


def attribute_stores(tree: ast.AST) -> Iterator[ast.Attribute]:
    """Yield every attribute that is assigned in `tree`. Counters that are only incremented are left out."""
    incremented = {id(node.target) for node in ast.walk(tree) if isinstance(node, ast.AugAssign)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and id(node) not in incremented:
            yield node


def name_of(owner: ast.expr) -> str:
    """Return the last name of an expression: "engine" for `engine`, `self._engine` and `parts.engine`."""
    if isinstance(owner, ast.Attribute):
        return owner.attr.removeprefix("_")
    return owner.id.removeprefix("_") if isinstance(owner, ast.Name) else ""


def assignments_to_components(source: str) -> list[str]:
    return [ast.unparse(store) for store in attribute_stores(ast.parse(source)) if name_of(store.value) in COMPONENTS]


def assignments_to_private_attributes(source: str) -> list[str]:
    """Return the assigned private attributes of objects other than self and cls."""
    if not PRIVATE_OF_OTHERS.search(source):
        return []
    return [
        ast.unparse(store)
        for store in attribute_stores(ast.parse(source))
        if store.attr.startswith("_")
        and not store.attr.endswith("__")  # those of the language are public
        and not (isinstance(store.value, ast.Name) and store.value.id in ("self", "cls"))
        and ast.unparse(store) not in FOREIGN
    ]


def test_no_private_attribute_is_assigned_from_outside() -> None:
    found = {
        str(path.relative_to(ROOT)): assigned
        for package in ("services/baton", "loadgen")
        for path in sorted((ROOT / package).rglob("*.py"))
        if not path.match("*_pb2*.py") and (assigned := assignments_to_private_attributes(path.read_text()))
    }
    assert not found, "pass the value to the constructor"


def test_check_finds_private_attributes_that_are_assigned_from_outside() -> None:
    source = """
run._history = history.copy()
run._paused_s: float = 1.0
run._Cache = 1
(other._rest, self._rest) = values
self.run._written_with = layout
run.history = history
cls._cache = {}
_history = history
"""
    found = assignments_to_private_attributes(source)
    assert sorted(found) == ["other._rest", "run._Cache", "run._history", "run._paused_s", "self.run._written_with"]


def test_no_component_attribute_is_assigned_from_outside() -> None:
    found = {
        str(path.relative_to(ROOT)): assigned
        for path in sorted((ROOT / "services" / "baton").rglob("*.py"))
        if (assigned := assignments_to_components(path.read_text()))
    }
    assert not found, "pass the dependency to the constructor, or register through a method"


def test_check_finds_late_bound_dependencies() -> None:
    source = """
parts.engine.pace = StepTiming()
engine.pool.on_room = wake.set
self._reader.times, other = times, 1
self.engine = engine
engine = Engine(config, pool)
"""
    found = assignments_to_components(source)
    assert found == ["parts.engine.pace", "engine.pool.on_room", "self._reader.times"]
