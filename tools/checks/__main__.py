"""Runs the checks: `python -m tools.checks [NAME ...]`.

Prints one line per problem. The exit code is 1 if there is any.
"""

import sys
from collections.abc import Callable, Mapping

from tools.checks import commits, docstrings, layout, links, names, unused
from tools.checks.source import Repository

CHECKS: Mapping[str, Callable[[Repository], list[str]]] = {
    "retired-words": names.retired_words,
    "unique-classes": names.unique_classes,
    "unique-modules": names.unique_modules,
    "docstrings": docstrings.first_lines,
    "module-docstrings": docstrings.modules_without_docstring,
    "stray-docstrings": docstrings.stray_docstrings,
    "folder-size": layout.large_folders,
    "function-length": layout.long_functions,
    "line-width": layout.wide_lines,
    "unimported-modules": unused.unimported_modules,
    "unused-names": unused.unused_names,
    "links": links.broken_links,
    "mentioned-files": links.missing_files,
    "commit-subjects": commits.subjects,
}


def main(asked: list[str]) -> int:
    """Run the named checks, or all. Returns the exit code."""
    if unknown := [name for name in asked if name not in CHECKS]:
        print(f"no such check: {', '.join(unknown)}; there are {', '.join(CHECKS)}", file=sys.stderr)
        return 2
    repository = Repository.open()
    failed = False
    for name in asked or CHECKS:
        problems = CHECKS[name](repository)
        failed = failed or bool(problems)
        for problem in problems:
            print(f"{name}: {problem}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
