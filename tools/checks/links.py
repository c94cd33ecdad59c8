"""Links in Markdown: each relative link names a file that exists, each anchor a heading of its page."""

import re
from collections import Counter
from pathlib import PurePosixPath
from posixpath import normpath

from tools.checks.source import Repository

_FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`[^`\n]*`")
_LINK = re.compile(
    r"(?<!!)\[[^\]]*\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)"
    r"|!\[[^\]]*\]\(([^)\s]+)\)"
    r"|<(?:img|a)\s[^>]*(?:src|href)=\"([^\"]+)\""
)
_CODE_PATH = re.compile(r"`([\w.-]+(?:/[\w.-]+)+\.(?:py|h|cpp|md|yaml|json|proto|toml|txt))`")
_ROOTS = ("", "services/baton/", "helm/baton/", "tests/", "docs/", "bench/", "services/baton/model/")
_NOT_OURS = re.compile(r"^(site-packages|~)|\*|^\.")
_HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*#*\s*$", re.MULTILINE)
_ANCHOR = re.compile(r"(?:id|name)=\"([^\"]+)\"|\{#([\w-]+)\}")


def broken_links(repository: Repository) -> list[str]:
    """Name each relative link that leads nowhere. Links to other hosts are not followed."""
    pages = {path: repository.read(path) for path in repository.matching(".md")}
    anchors = {path: anchors_of(text) for path, text in pages.items()}
    exists = set(repository.paths)
    folders = {str(parent) for path in exists for parent in PurePosixPath(path).parents}
    problems = []
    for path, text in pages.items():
        for target in links_of(text):
            if re.match(r"[a-z][a-z0-9+.-]*:", target):
                continue
            file, _, anchor = target.partition("#")
            found = normpath(str(PurePosixPath(path).parent / file)) if file else path
            if found not in exists and found not in folders:
                problems.append(f"{path}: link to {target}: no such file")
            elif anchor and found in anchors and anchor not in anchors[found]:
                problems.append(f"{path}: link to {target}: the page has no such heading")
    return problems


def missing_files(repository: Repository) -> list[str]:
    """Name each file that a page mentions in code and that does not exist.

    A path may be relative to the repository or to one of its source folders.
    """
    exists = set(repository.paths)
    problems = []
    for path in repository.matching(".md"):
        if path in ("CHANGELOG.md",) or path.startswith("docs/benchmarks/log/"):
            continue  # history names files as they were
        problems += [
            f"{path}: mentions `{mentioned}`: no such file"
            for mentioned in _CODE_PATH.findall(_FENCE.sub("", repository.read(path)))
            if not _NOT_OURS.search(mentioned) and not any(root + mentioned in exists for root in _ROOTS)
        ]
    return problems


def links_of(text: str) -> list[str]:
    """Targets of the links and images of a page, without those in code."""
    text = _CODE.sub("", _FENCE.sub("", text))
    return [next(filter(None, match)) for match in _LINK.findall(text)]


def anchors_of(text: str) -> set[str]:
    """Anchors of the headings of a page, as GitHub and mkdocs make them, and anchors that are set by hand."""
    text = _FENCE.sub("", text)
    found: Counter[str] = Counter()
    anchors = {next(filter(None, match)) for match in _ANCHOR.findall(text)}
    for heading in _HEADING.findall(text):
        slug = (
            re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower())
            .strip()
            .replace(" ", "-")
        )
        anchors |= (
            {slug, re.sub(r"-+", "-", slug)} if not found[slug] else {f"{slug}-{found[slug]}", f"{slug}_{found[slug]}"}
        )
        found[slug] += 1
    return anchors
