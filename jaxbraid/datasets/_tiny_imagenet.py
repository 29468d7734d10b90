"""Tiny ImageNet: 200 classes of photographs with 64 x 64 pixels, in folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Int, UInt8

from jaxbraid._options import check_choice, check_integer
from jaxbraid.datasets._files import PathLike, existing, of_classes


class TinyImageNet(NamedTuple):
    """Colour images 0..255, their classes, and the WordNet identifiers of the classes."""

    images: UInt8[np.ndarray, "images rows columns 3"]
    labels: Int[np.ndarray, " images"]
    classes: tuple[str, ...]


def load_tiny_imagenet(
    folder: PathLike,
    split: Literal["train", "val"] = "train",
    *,
    classes: int | None = None,
    per_class: int | None = None,
) -> TinyImageNet:
    """Images and labels of Tiny ImageNet, read with Pillow.

    **Arguments**

    - `folder`: `tiny-imagenet-200`, with `train/<wnid>/images/*.JPEG`, `val/images/*.JPEG` and
        `val/val_annotations.txt`.
    - `split`: `"train"` or `"val"` (the test images have no labels).
    - `classes`: only the first so many of the classes in `wnids.txt` (or else, of the folders in
        `train`, sorted). Label i is the i-th of them.
    - `per_class`: only the first so many images of each class.

    **Returns**

    `TinyImageNet(images, labels, classes)`. Grey images are given three equal channels.

    **Raises**

    `FileNotFoundError`, `ImportError` if Pillow is missing, or `ValueError` saying what is wrong
    with the file.
    """
    check_choice("split", split, ("train", "val"))
    folder = existing(folder, "the folder 'tiny-imagenet-200'", folder=True)
    names = _classes(folder)
    if classes is not None and check_integer("classes", classes, 1, " or None") > len(names):
        raise ValueError(f"classes={classes}: {folder} has {len(names)} only.")
    names = names[:classes]
    found = (_train if split == "train" else _val)(folder, names)
    paths, labels = of_classes(found, per_class, folder, split)
    images = [_read_image(path) for path in paths]
    for path, image in zip(paths, images, strict=True):
        if image.shape != images[0].shape:
            raise ValueError(
                f"{path}: has the shape {image.shape}: must have {images[0].shape}, as "
                f"{paths[0].name} has."
            )
    return TinyImageNet(np.stack(images), labels, names)


def _classes(folder: Path) -> tuple[str, ...]:
    listed = folder / "wnids.txt"
    if listed.is_file():
        names = tuple(listed.read_text().split())
    else:
        train = existing(folder / "train", "a folder with one folder a class", folder=True)
        names = tuple(sorted(p.name for p in train.iterdir() if p.is_dir()))
    if not names:
        raise ValueError(f"{folder}: has no classes, in wnids.txt or as folders in train.")
    return names


def _train(folder: Path, names: tuple[str, ...]) -> dict[str, list[Path]]:
    found = {}
    for name in names:
        images = existing(folder / "train" / name / "images", "a class's images", folder=True)
        found[name] = list(images.glob("*.JPEG"))
    return found


def _val(folder: Path, names: tuple[str, ...]) -> dict[str, list[Path]]:
    table = existing(folder / "val" / "val_annotations.txt", "the labels, a line an image")
    found: dict[str, list[Path]] = {name: [] for name in names}
    for i, line in enumerate(table.read_text().splitlines()):
        entries = line.split("\t")
        if len(entries) < 2:
            raise ValueError(f"{table}: line {i + 1} has no image and class: {line!r}.")
        if entries[1] in found:
            path = existing(folder / "val" / "images" / entries[0], f"in line {i + 1} of {table}")
            found[entries[1]].append(path)
    return found


def _read_image(path: Path) -> np.ndarray:
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("Images are read with Pillow: pip install pillow.") from error
    try:
        with Image.open(path) as image:
            pixels: Any = image.convert("RGB")
            return np.asarray(pixels)
    except OSError as error:
        raise ValueError(f"{path}: is no complete image: {error}.") from None
