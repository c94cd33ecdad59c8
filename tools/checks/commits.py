"""Commit subjects: `area: what changed`, at most 72 characters."""

import re
import subprocess

from tools.checks.source import Repository

SINCE = "5bd758d47ef05da7b3ed5bedbbb792cf21651361"
"""Commits after this one follow the rule. Its full history holds older subjects."""
MAX_LENGTH = 72
_SUBJECT = re.compile(r"[a-z0-9][a-z0-9_./ -]*(?:, [a-z0-9_./ -]+)*: \S.*[^.]")


def subjects(repository: Repository) -> list[str]:
    """Name each new commit whose subject breaks the rule; nothing where there is no history."""
    command = ["git", "-C", str(repository.root), "log", "--no-merges", "--format=%h %s", f"{SINCE}..HEAD"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        return []
    return [
        f"commit {line.split()[0]}: {problem}"
        for line in listed.stdout.splitlines()
        if (problem := problem_of(line.partition(" ")[2])) is not None
    ]


def problem_of(subject: str) -> str | None:
    """Return the problem of a subject, or None."""
    if len(subject) > MAX_LENGTH:
        return f"the subject has {len(subject)} characters, at most {MAX_LENGTH}: {subject}"
    if _SUBJECT.fullmatch(subject) is None:
        return f"the subject is not `area: what changed`: {subject}"
    return None
