"""Rules that are written in one place only: eligibility, step sizing, and each policy in its own module."""

import ast
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from baton.scheduler.policies import POLICIES

SERVICES = Path(__file__).resolve().parents[2] / "services"

ELIGIBILITY = "baton/scheduler/policies/eligibility.py"
ELIGIBILITY_FACTS = {
    "WorkerState",
    "avoid",
    "free_seqs",
    "free_tokens",
    "is_broken",
    "is_warm",
    "kv_group",
    "kv_groups",
    "max_decode_tokens",
    "max_prefill_tokens",
    "mismatch",
}
"""Names by which a policy would decide on its own that a worker is not eligible or not readable."""

STEP_SIZING_USERS = {"baton/engine/scheduling/step_budget.py"}


def names_in(source: str) -> set[str]:
    """Return the names and attributes that a module uses or imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.name for alias in node.names}
    return found


def users_of(names: set[str], folder: str) -> set[str]:
    return {
        str(path.relative_to(SERVICES))
        for path in sorted((SERVICES / folder).rglob("*.py"))
        if any(name in (source := path.read_text()) for name in names) and names & names_in(source)
    }


def imported_names(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)


def forwarding_calls(source: str, policy: str) -> list[str]:
    """Return the calls by which `policy` only passes on its arguments, or passes flags to another module.

    A flag is a truth value, or a parameter of the policy besides its three inputs.
    """
    tree = ast.parse(source)
    imported = set(imported_names(tree))
    function = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == policy)
    inputs = {arg.arg for arg in function.args.args}
    flags = {arg.arg for arg in function.args.kwonlyargs}
    body = [node for node in function.body if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))]
    found = []
    for node in ast.walk(function):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.func.id not in imported:
            continue
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        passes_flag = any(
            (isinstance(each, ast.Constant) and isinstance(each.value, bool))
            or (isinstance(each, ast.Name) and each.id in flags)
            for each in arguments
        )
        is_whole_body = len(body) == 1 and isinstance(body[0], ast.Return) and body[0].value is node
        passes_inputs_only = all(isinstance(each, ast.Name) and each.id in inputs for each in arguments)
        if passes_flag or (is_whole_body and passes_inputs_only):
            found.append(ast.unparse(node))
    return found


def test_only_one_module_of_the_policies_decides_eligibility() -> None:
    assert users_of(ELIGIBILITY_FACTS, "baton/scheduler/policies") == {ELIGIBILITY}, "call a function of eligibility.py"


def test_only_the_step_budget_sizes_engine_steps() -> None:
    assert users_of({"planned_s"}, "baton") == STEP_SIZING_USERS, "call engine.scheduling.step_budget.plan"


@pytest.mark.parametrize(("name", "policy"), POLICIES.items(), ids=POLICIES)
def test_policy_is_written_in_the_module_of_its_name(name: str, policy: Callable[..., object]) -> None:
    assert inspect.isfunction(policy)
    assert (policy.__name__, policy.__module__) == (name, f"baton.scheduler.policies.{name}")
    assert forwarding_calls(inspect.getsource(inspect.getmodule(policy) or policy), name) == []


def test_check_finds_policies_that_only_forward() -> None:
    source = """
from baton.ranking import rank_all, readable
def forwards(query, cluster, context):
    "Rank all."
    return rank_all(query, cluster, context)
def sets_flags(query, cluster, context, *, charge=True):
    workers = readable(cluster)
    return rank_all(query, workers, pull=True) or rank_all(query, workers, charge=charge)
def decides(query, cluster, context):
    return rank_all(query, cluster, context, lambda worker: worker.queue_s)
"""
    assert forwarding_calls(source, "forwards") == ["rank_all(query, cluster, context)"]
    assert forwarding_calls(source, "sets_flags") == [
        "rank_all(query, workers, pull=True)",
        "rank_all(query, workers, charge=charge)",
    ]
    assert forwarding_calls(source, "decides") == []


def test_names_of_a_module_include_attributes_and_imports() -> None:
    assert {"WorkerState", "is_broken"} <= names_in("from x import WorkerState\nw.links.is_broken[0]\n")
