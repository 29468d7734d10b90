"""What the loaders share: errors that name the file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from jaxbraid._options import check_integer

PathLike = str | os.PathLike[str]


def existing(path: PathLike, what: str, folder: bool = False) -> Path:
    """`path`, if there is such a file or folder."""
    path = Path(path)
    if not (path.is_dir() if folder else path.is_file()):
        kind = "folder" if folder else "file"
        raise FileNotFoundError(f"{path}: there is no such {kind}; it should be {what}.")
    return path


def of_classes(
    found: Mapping[str, Iterable[Path]], per_class: int | None, folder: Path, split: str
) -> tuple[list[Path], np.ndarray]:
    """The first `per_class` files (or all) of each class, sorted, and their classes as numbers."""
    if per_class is not None:
        check_integer("per_class", per_class, 1, " or None")
    paths, labels = [], []
    for label, (name, files) in enumerate(found.items()):
        own = sorted(files)[:per_class]
        if not own:
            raise FileNotFoundError(f"{folder}: has no {split} files of the class {name}.")
        paths += own
        labels += [label] * len(own)
    return paths, np.array(labels)


def read_rows(path: PathLike, what: str, dtype: type, columns: int | None = None) -> np.ndarray:
    """A table of numbers, `(rows, columns)`, from text with blanks between them."""
    path = existing(path, what)
    lines = [line.split() for line in path.read_text().splitlines() if line.strip()]
    if not lines:
        raise ValueError(f"{path}: is empty; it should be {what}.")
    columns = columns or len(lines[0])
    for i, line in enumerate(lines):
        if len(line) != columns:
            raise ValueError(f"{path}: row {i + 1} has {len(line)} numbers: must have {columns}.")
    try:
        return np.array(lines).astype(dtype)
    except ValueError as error:
        raise ValueError(f"{path}: {error}; it should be {what}.") from None


def same_length(path: PathLike, n: int, expected: int, of: str) -> None:
    """Raises `ValueError` if a file has not as many entries as another."""
    if n != expected:
        raise ValueError(f"{path}: has {n} entries: must have {expected}, as many as {of}.")
