"""Run the Python blocks of a page, one after another; a text block behind one is its output.

    python docs/run_blocks.py docs/choosing.md      # writes what they print into the page

tests/test_docs.py compares them. A page is run in single precision unless it asks for double. A
block behind `<!-- compiled only: why -->` is compiled and not run; one behind `<!-- long: ... -->`
is not run by the tests.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax

CODE = re.compile(
    r"(?P<mark><!-- (?P<kind>compiled only|long).*?-->\n)?^```python\n(?P<code>.*?)^```\n"
    r"(?:\n```text\n(?P<shown>.*?)^```\n)?",
    re.S | re.M,
)


def blocks(text: str) -> Iterator[re.Match]:
    return CODE.finditer(text)


def run(text: str, names: dict, long: bool = True) -> list[tuple[str, str | None, str]]:
    """Each block's code, the output that the page shows (if any), and the one that it has.

    `names` are what the first block knows, and in the end what all have defined. Without `long`,
    blocks that take long are compiled only. What they write goes into a folder that is then gone.
    """
    names["__name__"] = "page"
    skip = ("compiled only",) if long else ("compiled only", "long")
    done = []
    before, here = jax.config.jax_enable_x64, os.getcwd()
    jax.config.update("jax_enable_x64", "jax_enable_x64" in text)
    try:
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            for match in blocks(text):
                code = compile(match["code"], "block", "exec")
                if match["kind"] in skip:
                    continue
                with contextlib.redirect_stdout(io.StringIO()) as out:
                    exec(code, names)
                    jax.effects_barrier()
                done.append((match["code"], match["shown"], out.getvalue()))
    finally:
        os.chdir(here)
        jax.config.update("jax_enable_x64", before)
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pages", nargs="+", type=Path)
    for page in parser.parse_args().pages:
        text = page.read_text()
        results = iter(run(text, {}))

        def write(match: re.Match, results=results) -> str:
            if match["kind"] == "compiled only":
                return match[0]
            _, shown, printed = next(results)
            output = "" if shown is None else f"\n```text\n{printed}```\n"
            return f"{match['mark'] or ''}```python\n{match['code']}```\n{output}"

        page.write_text(CODE.sub(write, text))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main()
