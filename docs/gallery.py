"""Run the examples of docs/gallery.md and keep their pictures, small.

    python docs/gallery.py [name ...]

The command beside a picture on that page is the one that is run.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

HERE = Path(__file__).parent
ROW = re.compile(r"\(images/(\w+)\.png\).*?`python (examples/\S+\.py.*?)`", re.S)
WIDTH, COLOURS = 1000, 128


def shrink(source: Path, target: Path) -> None:
    image = Image.open(source).convert("RGB")
    if image.width > WIDTH:
        image = image.resize((WIDTH, round(image.height * WIDTH / image.width)), Image.LANCZOS)
    image.quantize(COLOURS, dither=Image.Dither.NONE).save(target, optimize=True)


def main() -> None:
    root, names = HERE.parent, sys.argv[1:]
    paths = (str(root), os.environ.get("PYTHONPATH"))
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    for name, command in ROW.findall((HERE / "gallery.md").read_text()):
        if names and name not in names:
            continue
        print(f"python {command}", flush=True)
        with tempfile.TemporaryDirectory() as out:
            arguments = [sys.executable, *command.split(), "--out", out]
            subprocess.run(arguments, check=True, cwd=root, env=env, stdout=subprocess.DEVNULL)
            shrink(Path(out) / f"{name}.png", HERE / "images" / f"{name}.png")


if __name__ == "__main__":
    main()
