"""Dead code: modules that nothing imports, and definitions that occur only once in the code."""

import ast
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from tools.checks.source import Repository, Source

PRODUCT = ("services/", "loadgen/", "bench/")
WITH_USED_NAMES = ("services/", "loadgen/")
ENTRY_MODULES: Mapping[str, str] = {
    "loadgen.commands.capacity_command": "loadgen.cli imports commands by name",
    "loadgen.commands.compare_command": "loadgen.cli imports commands by name",
    "loadgen.commands.report_command": "loadgen.cli imports commands by name",
    "loadgen.commands.selftest_command": "loadgen.cli imports commands by name",
}
"""Modules that no module imports and that are no programs, with the reason."""
USED_ELSEWHERE: Mapping[str, str] = {
    **dict.fromkeys(
        ("format_commands", "get_metavar", "shell_complete", "format_options", "format_epilog"),
        "click calls it; overrides a method",
    ),
    **dict.fromkeys(("pause_writing", "eof_received"), "asyncio calls it; method of a protocol"),
    "on_url": "httptools calls it",
    **dict.fromkeys(("send_400_response", "capture_signals"), "uvicorn calls it; overrides a method"),
    "get_map": "asyncio calls it; method of a selector",
    "_run_once": "asyncio calls it; overrides a method of the event loop",
    "InferenceClient": "client of the public gRPC API, for programs that use Baton as a library",
    "handleError": "overrides a method of the standard library",
    "repeat_decision": "repeats a stored decision record, for analysis",
    "stop_worker": "part of the interface of InProcessCluster, for rolling releases in the simulator",
    "itl_s": "definition of the metric, for programs that read records",
}
"""Names that occur once in the code, with the reason why they stay."""
_NAME = re.compile(r"[A-Za-z_]\w*")


def unimported_modules(repository: Repository) -> list[str]:
    """Name each module that no module imports and that is no program."""
    sources = list(repository.python(*PRODUCT, "tools/"))
    imported = {name for source in sources for name in _imports(source)}
    return [
        f"{source.path}: no module imports it, and it is no program"
        for source in sources
        if source.path.startswith(PRODUCT)
        and not source.path.endswith(("__init__.py", "__main__.py"))
        and (module := _module_of(source.path)) not in imported
        and module not in ENTRY_MODULES
        and '__name__ == "__main__"' not in source.text
    ]


def unused_names(repository: Repository) -> list[str]:
    """Name each function, class, method or constant whose name occurs only at its definition.

    Tests do not count as a use. Functions that a decorator registers as a command are used by it.
    """
    sources = [s for s in repository.python(*PRODUCT, "tools/") if not s.path.startswith("tools/checks/")]
    occurrences = Counter(name for source in sources for name in _NAME.findall(source.text))
    return [
        f"{source.path}:{line}: {name} is used nowhere; delete it"
        for source in sources
        if source.path.startswith(WITH_USED_NAMES)
        for name, line in _definitions(source.tree.body)
        if occurrences[name] == 1 and name not in USED_ELSEWHERE
    ]


def _definitions(body: Sequence[ast.stmt], *, in_class: bool = False) -> Iterator[tuple[str, int]]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield node.name, node.lineno
            yield from _definitions(node.body, in_class=True)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if not node.name.startswith("__") and not any(map(_registers_command, node.decorator_list)):
                yield node.name, node.lineno
        elif isinstance(node, ast.Assign | ast.AnnAssign) and not in_class:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from ((target.id, node.lineno) for target in targets if isinstance(target, ast.Name))


def _registers_command(decorator: ast.expr) -> bool:
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return isinstance(called, ast.Attribute) and called.attr == "command"


def _imports(source: Source) -> Iterator[str]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _module_of(path: str) -> str:
    return path.removeprefix("services/").removesuffix(".py").replace("/", ".")
