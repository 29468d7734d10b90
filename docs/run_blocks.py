"""Run the Python blocks of a page, one after another; a text block behind one is its output.

    python docs/run_blocks.py docs/choosing.md      # writes what they print into the page

tests/test_docs.py compares them. A page is run in single precision unless it asks for double.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import sys
from pathlib import Path

import jax

CODE = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.S | re.M)


def run(text: str) -> list[tuple[str, str | None, str]]:
    """Each block's code, the output that the page shows (if any), and the one that it has."""
    names: dict = {"__name__": "page"}
    done = []
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", "jax_enable_x64" in text)
    try:
        for match in CODE.finditer(text):
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile(match[1], "block", "exec"), names)
                jax.effects_barrier()
            done.append((match[1], match[2], out.getvalue()))
    finally:
        jax.config.update("jax_enable_x64", before)
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pages", nargs="+", type=Path)
    for page in parser.parse_args().pages:
        text = page.read_text()
        results = iter(run(text))

        def write(match: re.Match, results=results) -> str:
            _, shown, printed = next(results)
            output = "" if shown is None else f"\n```text\n{printed}```\n"
            return f"```python\n{match[1]}```\n{output}"

        page.write_text(CODE.sub(write, text))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main()
