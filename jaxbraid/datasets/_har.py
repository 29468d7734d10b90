"""UCI-HAR: human activity recognised by smartphones, windows of 128 samples as text."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float32, Int

from jaxbraid._options import check_choice
from jaxbraid.datasets._files import PathLike, existing, read_rows, same_length

SIGNALS = tuple(
    f"{kind}_{axis}" for kind in ("body_acc", "body_gyro", "total_acc") for axis in "xyz"
)


class UciHar(NamedTuple):
    """Windows of nine signals, the activity 0..5 in each, and the person 1..30 who did it."""

    signals: Float32[np.ndarray, "windows steps 9"]
    labels: Int[np.ndarray, " windows"]
    subjects: Int[np.ndarray, " windows"]


def load_uci_har(folder: PathLike, split: Literal["train", "test"] = "train") -> UciHar:
    """Inertial signals of UCI-HAR, in the order of its file names (`SIGNALS`).

    **Arguments**

    - `folder`: "UCI HAR Dataset", with the folders `train` and `test`.
    - `split`: `"train"` or `"test"`.

    **Returns**

    `UciHar(signals, labels, subjects)`: `(n, 128, 9)`, `(n,)`, `(n,)`. Labels start with 0 (in the
    files, with 1): walking, upstairs, downstairs, sitting, standing, laying.

    **Raises**

    `FileNotFoundError`, or `ValueError` saying what is wrong with the file.

    ??? cite "Reference"

        D. Anguita, A. Ghio, L. Oneto, X. Parra, J. L. Reyes-Ortiz: A public domain dataset for
        human activity recognition using smartphones. ESANN 2013.
    """
    check_choice("split", split, ("train", "test"))
    folder = existing(folder, "the folder 'UCI HAR Dataset'", folder=True)
    part = existing(folder / split, f"the folder '{split}' of UCI-HAR", folder=True)
    labels_path, subjects_path = part / f"y_{split}.txt", part / f"subject_{split}.txt"
    labels = read_rows(labels_path, "one activity a row", int, columns=1)[:, 0] - 1
    if labels.min() < 0 or labels.max() > 5:
        raise ValueError(f"{labels_path}: has labels that are not 1..6.")
    subjects = read_rows(subjects_path, "one person a row", int, columns=1)[:, 0]
    same_length(subjects_path, len(subjects), len(labels), labels_path.name)

    columns, steps = [], None
    for name in SIGNALS:
        path = part / "Inertial Signals" / f"{name}_{split}.txt"
        rows = read_rows(path, "a window of samples a row", np.float32, columns=steps)
        same_length(path, len(rows), len(labels), labels_path.name)
        steps = rows.shape[1]
        columns.append(rows)
    return UciHar(np.stack(columns, axis=-1), labels, subjects)
