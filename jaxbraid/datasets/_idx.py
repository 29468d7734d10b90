"""MNIST and its relatives: arrays in the IDX format.

Two zero bytes, a type, the number of dimensions, their sizes (big-endian, 32 bits), the data.
"""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path
from typing import Literal

import numpy as np
from jaxtyping import UInt8

from jaxbraid._options import check_choice
from jaxbraid.datasets._files import PathLike, existing, same_length

TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def read_idx(path: PathLike) -> np.ndarray:
    """The array in an IDX file, plain or compressed by gzip (told from its first bytes).

    **Raises**

    `FileNotFoundError`, or `ValueError` saying what is wrong with the file.
    """
    path = existing(path, "an IDX file")
    data = path.read_bytes()
    if data[:2] == b"\x1f\x8b":
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{path}: is not complete, or no gzip: {error}.") from None
    if len(data) < 4 or data[:2] != b"\0\0" or data[2] not in TYPES:
        raise ValueError(f"{path}: is no IDX file: begins with {data[:4]!r}.")
    dtype, ndim = np.dtype(TYPES[data[2]]), data[3]
    start = 4 + 4 * ndim
    if len(data) < start:
        raise ValueError(f"{path}: ends within its header of {start} bytes.")
    shape = tuple(int(n) for n in np.frombuffer(data, ">u4", ndim, 4))
    size = int(np.prod(shape, dtype=object)) * dtype.itemsize
    if len(data) - start != size:
        raise ValueError(
            f"{path}: has {len(data) - start} bytes of data: must have {size} for the shape "
            f"{shape}."
        )
    array = np.frombuffer(data, dtype, offset=start).reshape(shape)
    return array.astype(dtype.newbyteorder("="))


def load_mnist(
    folder: PathLike, split: Literal["train", "test"] = "train"
) -> tuple[UInt8[np.ndarray, "images rows columns"], UInt8[np.ndarray, " images"]]:
    """Images and labels of MNIST, or of a set in its form (Fashion-MNIST, EMNIST by one name).

    **Arguments**

    - `folder`: has `train-images-idx3-ubyte` and the like (`t10k-...` for the test), also with a
        dot in place of the second dash, with or without `.gz`.
    - `split`: `"train"` or `"test"`.

    **Returns**

    Images 0..255 of shape `(n, 28, 28)`, and labels `(n,)`.

    **Raises**

    `FileNotFoundError`, or `ValueError` saying what is wrong with the file.
    """
    check_choice("split", split, ("train", "test"))
    folder = existing(folder, "a folder of IDX files", folder=True)
    prefix = "train" if split == "train" else "t10k"
    images_path = _one_of(folder, f"{prefix}-images", "idx3-ubyte")
    labels_path = _one_of(folder, f"{prefix}-labels", "idx1-ubyte")
    images, labels = read_idx(images_path), read_idx(labels_path)
    for path, array, ndim in ((images_path, images, 3), (labels_path, labels, 1)):
        if array.ndim != ndim or array.dtype != np.uint8:
            raise ValueError(
                f"{path}: holds {array.dtype} of shape {array.shape}: must hold bytes in {ndim} "
                "dimensions."
            )
    same_length(labels_path, len(labels), len(images), images_path.name)
    return images, labels


def _one_of(folder: Path, stem: str, form: str) -> Path:
    names = [f"{stem}{dot}{form}{gz}" for dot in "-." for gz in ("", ".gz")]
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise FileNotFoundError(f"{folder}: has none of {', '.join(names)}.")
