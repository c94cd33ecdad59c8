"""Merges the metrics pages of several processes into one page in Prometheus text format."""

from collections.abc import Iterable
from dataclasses import dataclass

UP = "baton_process_up"
UP_LABELS = ("instance", "process", "kind")
UP_MEANING = "1 if the process answered the last collection of its metrics, else 0."


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessMetricsPage:
    """The metrics of one process.

    kind, process: kind and id of the member.
    instance: address of its admin port.
    text: its metrics page; None if it did not answer.
    """

    kind: str
    process: str
    instance: str
    text: str | None


def merge_pages(pages: Iterable[ProcessMetricsPage]) -> str:
    """Return one page with all samples, each labelled with `instance` and `process`, which no metric has.

    Samples of one metric are adjacent, as the format requires. The metric `baton_process_up` says which
    processes answered.
    """
    families: dict[str, list[str]] = {UP: [f"# HELP {UP} {UP_MEANING}", f"# TYPE {UP} gauge"]}
    for page in pages:
        labels = ",".join(
            f'{name}="{_escaped(value)}"' for name, value in (("instance", page.instance), ("process", page.process))
        )
        families[UP].append(f'{UP}{{{labels},kind="{_escaped(page.kind)}"}} {int(page.text is not None)}')
        if page.text is not None:
            _add(families, page.text, labels)
    return "\n".join(line for lines in families.values() for line in lines) + "\n"


def _add(families: dict[str, list[str]], text: str, labels: str) -> None:
    """Add the samples of one page. Lines that are not of the text format are left out."""
    family: list[str] = []
    is_new = False
    for line in text.split("\n"):
        if line.startswith("# HELP "):
            name = line.split(" ", 3)[2]
            is_new = name not in families
            family = families.setdefault(name, [])
        if line.startswith("#"):
            if is_new:
                family.append(line)
            continue
        brace, space = line.find("{"), line.find(" ")
        if space <= 0:
            continue
        if 0 < brace < space:
            rest = line[brace + 1 :]
            family.append(f"{line[:brace]}{{{labels}{'' if rest.startswith('}') else ','}{rest}")
        else:
            family.append(f"{line[:space]}{{{labels}}}{line[space:]}")


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
