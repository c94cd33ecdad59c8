"""Finds the parts of a split GGUF file, and checks that they belong together. Imports no torch.

Source: llama.cpp's `gguf-split`, its loader (src/llama-model-loader.cpp), and the writer of the gguf library.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from baton.core.errors import ModelError

GGUF_LINK = "model.gguf"
"""Link to the GGUF file in the directory that is made from it."""
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
NO, COUNT, TENSORS = "split.no", "split.count", "split.tensors.count"
"""Metadata of each part: its number from 0, the number of parts, and that of the tensors of all parts.

In a file that was joined the number of parts is 0."""


def part_paths(path: Path) -> list[Path]:
    """Return the files of a GGUF model in order: all parts if the name is that of any part, else `path`.

    Parts lie in one folder and have names such as NAME-00001-of-00003.gguf. A link counts by its own name, as
    in the cache of the hub. Raises ModelError if parts are missing.
    """
    names = _all_parts(path.name)
    if not names:
        return [path]
    paths = [path.with_name(name) for name in names]
    missing = [each for each in paths if not each.is_file()]
    if missing:
        raise ModelError(
            f"{path} is one of {len(paths)} parts, and {len(missing)} of them are missing, the first is {missing[0]}; "
            "download or copy all parts into one folder"
        )
    return paths


def first_part(path: str) -> str:
    """Return the name of the first part of a split GGUF file, given that of any part; else `path`."""
    return next(iter(_all_parts(path)), path)


def link_names(num_parts: int) -> list[str]:
    """Return the names of the links to a GGUF file, or to its parts, in the directory made from it."""
    return [GGUF_LINK] if num_parts == 1 else _part_names("model", num_parts)


def gguf_files(model_dir: Path) -> list[Path]:
    """Return the GGUF files with the weights of a model directory, parts in order; none if it has none."""
    whole = model_dir / GGUF_LINK
    links = [whole] if whole.is_file() else sorted(model_dir.glob("model-?????-of-?????.gguf"))
    return [link.resolve() for link in links]


def require_together(
    paths: Sequence[Path], metadata: Sequence[Mapping[str, Any]], names: Sequence[Collection[str]]
) -> None:
    """Raise ModelError unless these are all parts of one split file in order, or a file that is not split.

    metadata, names: of each file, and of its tensors.
    """
    if len(paths) == 1 and (count := _count(metadata[0])) != 1:
        raise ModelError(
            f"{paths[0]} is one of {count} parts, and has no name of a part; put all parts into one folder, with their "
            "names, such as NAME-00001-of-00003.gguf, and give one of them"
        )
    num_tensors = metadata[0].get(TENSORS)
    for number, (path, values) in enumerate(zip(paths, metadata, strict=True)):
        for key, value, wanted in (
            (NO, values.get(NO, 0), number),
            (COUNT, _count(values), len(paths)),
            (TENSORS, values.get(TENSORS), num_tensors),
        ):
            if value != wanted:
                raise ModelError(
                    f"{path} is not part {number + 1} of {len(paths)} of one model: its {key} is {value!r}; must be "
                    f"{wanted!r}. {_AGAIN}"
                )
    _require_distinct(paths, names)
    total = sum(map(len, names))
    if num_tensors is not None and total != num_tensors:
        raise ModelError(f"{paths[0]}: its parts have {total} tensors; {TENSORS} is {num_tensors!r}. {_AGAIN}")


def _count(metadata: Mapping[str, Any]) -> Any:
    """Return the number of parts that a file names, of any type."""
    return metadata.get(COUNT) or 1


def _require_distinct(paths: Sequence[Path], names: Sequence[Collection[str]]) -> None:
    """Raise ModelError if a tensor is in two parts."""
    owners: dict[str, Path] = {}
    for path, own in zip(paths, names, strict=True):
        for name in own:
            if name in owners:
                raise ModelError(f"{path}: the tensor {name!r} is in {owners[name].name}, too. {_AGAIN}")
            owners[name] = path


def _all_parts(path: str) -> list[str]:
    """Return the names of all parts, in order, if `path` is that of one; else none."""
    found = _PART.fullmatch(path)
    if found is None or not 1 <= int(found["number"]) <= int(found["count"]):
        return []
    return _part_names(found["stem"], int(found["count"]))


def _part_names(stem: str, count: int) -> list[str]:
    return [f"{stem}-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1)]


_AGAIN = "Download or copy all parts of one model again"
