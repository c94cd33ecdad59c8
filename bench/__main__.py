"""Run a benchmark by name, or list all of them: `python -m bench [NAME [ARGUMENTS]]`."""

import ast
import runpy
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from bench.systems.child_processes import exit_on_signals

SCENARIOS = Path(__file__).parent / "scenarios"


def scenarios() -> Mapping[str, Path]:
    """Return the file of each benchmark by its name, sorted by folder.

    A folder's `__main__.py` is the benchmark with the name of the folder.
    """
    files = [file for file in sorted(SCENARIOS.rglob("*.py")) if file.name != "__init__.py"]
    return {file.parent.name if file.name == "__main__.py" else file.stem: file for file in files}


def overview() -> str:
    """Return one line per benchmark: its name and the first paragraph of its docstring."""
    lines = [
        "python -m bench NAME [ARGUMENTS]      (make bench NAME=... ARGS=...; --help shows a benchmark's arguments)",
        "",
    ]
    folder = None
    for name, file in scenarios().items():
        if file.parent != folder:
            folder = file.parent
            lines.append(f"{folder.name}:")
        text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
        lines.append(f"  {name:22} {' '.join(text.partition(chr(10) * 2)[0].split())}")
    return "\n".join(lines)


def main(arguments: list[str], run: Callable[..., object] = runpy.run_module) -> int:
    """Run the named benchmark with the remaining arguments. SIGTERM and SIGINT end it and what it started.

    Return exit code 2 if no benchmark has this name.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        print(overview())
        return 0
    name, *rest = arguments
    file = scenarios().get(name.removesuffix(".py"))
    if file is None:
        print(f"unknown benchmark {name!r}; choose one of: {', '.join(scenarios())}", file=sys.stderr)
        return 2
    module = ".".join(("bench", *file.relative_to(SCENARIOS.parent).with_suffix("").parts))
    exit_on_signals()
    sys.argv = [f"python -m bench {name}", *rest]
    run(module, run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
