"""Run notebooks from top to bottom, each in a fresh kernel, and write them with their outputs.

python notebooks/run.py                        # all of them
python notebooks/run.py notebooks/01_*.ipynb   # only some
"""

import argparse
import base64
import io
import os
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from PIL import Image

HERE = Path(__file__).parent


def execute(notebook, env):
    """Runs a notebook in place, in a fresh kernel with the environment variables `env` besides.

    The kernel sees the package in this checkout. A cell that fails raises `CellExecutionError`.
    """
    paths = [str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    client = NotebookClient(
        notebook,
        timeout=600,
        kernel_name="python3",
        startup_timeout=300,
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(HERE)}},
    )
    client.execute(env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | env)


def tidy(notebook):
    """Takes out what differs from one run or machine to the next, but for results."""
    notebook.metadata = nbformat.from_dict(
        {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
    )
    for number, cell in enumerate(notebook.cells):
        cell.id, cell.metadata = f"cell-{number}", nbformat.from_dict({})
        for output in cell.get("outputs", []):
            if "image/png" in output.get("data", {}):
                output.data["image/png"] = with_palette(output.data["image/png"])


def with_palette(png):
    """A picture (in base64) with 256 colours at most, which is a third of the size."""
    image, out = Image.open(io.BytesIO(base64.b64decode(png))), io.BytesIO()
    if image.mode != "P":
        image = image.convert("RGB").quantize(256, dither=Image.Dither.NONE)
    image.save(out, "png", optimize=True)
    return base64.b64encode(out.getvalue()).decode()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="*", type=Path, default=sorted(HERE.glob("*.ipynb")))
    for path in parser.parse_args().paths:
        notebook, began = nbformat.read(path, as_version=4), time.perf_counter()
        execute(notebook, {})
        tidy(notebook)
        nbformat.write(notebook, path)
        print(f"{path.name:28} {time.perf_counter() - began:5.1f} s, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
