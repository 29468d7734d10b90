"""The documentation says what is there: public names, docstrings, links, code blocks."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs"))

import benchmark_table  # noqa: E402
import run_blocks  # noqa: E402

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
REFERENCE = sorted((ROOT / "docs" / "reference").glob("*.md"))


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


# -- public names ----------------------------------------------------------------------------------


def public_modules() -> dict[str, ast.Module]:
    """Modules whose path has no underscore, from their sources: one needs MPI to be imported."""
    found = {}
    for path in sorted((ROOT / "jaxbraid").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[-1] == "__init__":
            parts = parts[:-1]
        if not any(part.startswith("_") for part in parts):
            found[".".join(parts)] = ast.parse(path.read_text())
    return found


MODULES = public_modules()


def public_names(module: str) -> set[str]:
    """`__all__`; without it what is imported as itself (a package), or defined (a module)."""
    tree, names = MODULES[module], set()
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id="__all__")]):
                return set(ast.literal_eval(node.value))
            case ast.ImportFrom():
                names |= {a.name for a in node.names if a.asname == a.name}
            case ast.FunctionDef() | ast.ClassDef() if not node.name.startswith("_"):
                names.add(node.name)
    return {n for n in names if f"{module}.{n}" not in MODULES}


PUBLIC = sorted(f"{module}.{name}" for module in MODULES for name in public_names(module))


def of_mpi(name: str) -> bool:
    return name.startswith("jaxbraid.mpi")


def resolve(name: str):
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def test_reference_and_public_names_agree():
    """Each public object has one entry in the reference, and each entry is a public name."""
    entries = [
        entry
        for page in REFERENCE
        for entry in re.findall(r"^::: (\S+)$", page.read_text(), re.M)
        if entry not in MODULES
    ]
    assert sorted(set(entries)) == sorted(entries), "an entry stands in the reference twice"
    private = set(entries) - set(PUBLIC)
    assert not private, "the reference has names that are not public"
    documented = [resolve(entry) for entry in entries if not of_mpi(entry)]
    missing = {
        name
        for name in set(PUBLIC) - set(entries)
        if of_mpi(name) or not any(resolve(name) is known for known in documented)
    }
    assert not missing, "public names that the reference lacks"


def test_all_lists_are_true():
    for module in MODULES:
        if not of_mpi(module):
            here = importlib.import_module(module)
            assert all(hasattr(here, name) for name in public_names(module)), module
            assert inspect.getdoc(here), module


# -- docstrings ------------------------------------------------------------------------------------

HEADINGS = {"Arguments", "Returns", "Raises", "Fields"}


def docstring(name: str) -> str | None:
    if not of_mpi(name):
        return inspect.getdoc(resolve(name))
    module, _, attribute = name.rpartition(".")
    nodes = {
        n.name: n for n in MODULES[module].body if isinstance(n, ast.FunctionDef | ast.ClassDef)
    }
    return ast.get_docstring(nodes[attribute])


def parameters(thing) -> set[str]:
    """Of a function, or of a class's `__init__` (Flax hides it behind its metaclass)."""
    made = thing.__init__ if inspect.isclass(thing) else thing
    try:
        return set(inspect.signature(made).parameters)
    except ValueError:
        return set()


def listed_arguments(text: str) -> set[str]:
    """The names before the colons of the list under **Arguments**: - `a`, `b`: ...; `c`: ..."""
    found: set[str] = set()
    for part in re.findall(r"^\*\*Arguments\*\*\n\n(.*?)(?=^\*\*|^\?\?\?|\Z)", text, re.S | re.M):
        for names in re.findall(r"(?:^- |; )((?:`\*{0,2}\w+`(?:, |,\n| and )?)+):", part, re.M):
            found |= set(re.findall(r"\w+", names)) - {"and"}
    return found


# Constants, and classes whose instances Flax makes from the fields of Linen.
NO_FUNCTIONS = {"jaxbraid.performance.ITERATIONS", "jaxbraid.flax.linen.ParallelStack"}


@pytest.mark.parametrize("name", [n for n in PUBLIC if n not in NO_FUNCTIONS])
def test_docstring_has_the_form_of_the_house(name):
    text = docstring(name)
    assert text, "no docstring"
    summary = text.split("\n\n")[0]
    assert summary[0] in "`r" or not summary[0].islower(), "it does not begin like a sentence"
    assert summary.rstrip("`*").endswith((".", ":", "?")), (
        "its first paragraph does not end like one"
    )
    headings = re.findall(r"^\*\*(.+)\*\*$", text, re.M)
    assert set(headings) <= HEADINGS and len(set(headings)) == len(headings)
    assert not re.search(r"^(Args|Parameters|Returns|Raises):?$", text, re.M), (
        "another house's form"
    )
    if not of_mpi(name):
        unknown = listed_arguments(text) - parameters(resolve(name))
        assert not unknown, "it lists arguments that there are not"


# -- links -----------------------------------------------------------------------------------------

FENCE = re.compile(r"^( *)```.*?^\1```$", re.S | re.M)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def slug(heading: str) -> str:
    """The anchor of a heading, as both MkDocs and GitHub make it of plain words."""
    text = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading).strip().lower()
    return re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", text))


def anchors(page: Path) -> set[str]:
    text = page.read_text()
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.M)
    return {slug(h) for h in headings} | set(re.findall(r"^::: (\S+)$", text, re.M))


LINKING = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]


@pytest.mark.parametrize("page", LINKING, ids=name_of)
def test_links_lead_somewhere(page):
    for link in LINK.findall(FENCE.sub("", page.read_text())):
        if link.startswith(("https://", "http://")):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.is_file(), f"{link}: there is no such file"
        if anchor:
            assert anchor in anchors(target), f"{link}: there is no such heading"


def test_every_page_is_in_the_navigation():
    text = (ROOT / "mkdocs.yml").read_text()
    listed = re.findall(r"([\w/]+\.md)$", text[text.index("\nnav:") :], re.M)
    pages = [page.relative_to(ROOT / "docs").as_posix() for page in PAGES[1:]]
    assert sorted(listed) == sorted(pages)


# -- code ------------------------------------------------------------------------------------------

WITH_CODE = [page for page in PAGES if next(run_blocks.blocks(page.read_text()), None)]
NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")


def same(shown: str, printed: str) -> bool:
    """Equal words; numbers may differ as those of two machines and two releases of JAX do.

    Integers by one (iterations that a tolerance ends), others by a tenth; and where a number is no
    more than rounding, by a factor of ten.
    """
    one, other = (NUMBER.split(re.sub(r"\s+", " ", t).strip()) for t in (shown, printed))
    pairs = zip(NUMBER.findall(shown), NUMBER.findall(printed), strict=False)
    return one == other and all(close(a, b) for a, b in pairs)


def close(a: str, b: str) -> bool:
    if a.lstrip("+-").isdigit():
        return b.lstrip("+-").isdigit() and abs(int(a) - int(b)) <= 1
    x, y = float(a), float(b)
    if max(abs(x), abs(y)) < 1e-6:
        return x == y == 0 or 0.1 <= abs(x / y) <= 10 if y else abs(x) < 1e-14
    return abs(x - y) <= 0.1 * abs(x) + 2e-3


def test_comparison_of_outputs():
    assert same("a 1.00 3e-10\n", "a 1.05  8e-10")
    assert not same("a 1.0", "b 1.0")
    assert not same("a 1.0", "a 1.2")
    assert not same("ok 3", "ok 5")


def of_parallel_in_time(names):
    assert names["newton"].stats.residuals[-1] < 1e-3 * names["plain"].stats.residuals[-1]
    assert names["fine"].converged
    assert names["bound"].factor < 1


def of_training(names):
    assert names["nested"].losses[-1] < names["nested"].losses[0]
    assert names["loss"](names["params"], names["x"]) < names["nested"].losses[-1]


# What a page says of results that it does not show.
CLAIMS = {"docs/parallel_in_time.md": of_parallel_in_time, "docs/training.md": of_training}


@pytest.mark.parametrize("page", WITH_CODE, ids=name_of)
def test_code_of_a_page_runs_and_prints_what_it_shows(page):
    """Its blocks run one after another; those that are marked as long, only compile."""
    names = {}
    for code, shown, printed in run_blocks.run(page.read_text(), names, long=False):
        assert shown is None or same(shown, printed), f"{code}\nprints\n{printed}\nnot\n{shown}"
    CLAIMS.get(name_of(page), lambda names: None)(names)


def used_names() -> set[str]:
    """All names in blocks of pages, in blocks of docstrings, and in the examples."""
    code = [m["code"] for page in WITH_CODE for m in run_blocks.blocks(page.read_text())]
    code += [path.read_text() for path in (ROOT / "examples").glob("*.py")]
    code += [inspect.getdoc(importlib.import_module("jaxbraid.space")) or ""]
    return set(re.findall(r"\w+", "\n".join(code)))


def test_every_public_function_is_used_in_an_example():
    """What results are made of (Stats, Solution, ...) comes out of these, and is not called."""
    used = used_names()
    functions = {n for n in PUBLIC if not of_mpi(n) and inspect.isfunction(resolve(n))}
    assert {n for n in functions if n.rpartition(".")[2] not in used} == set()


def test_benchmarks_in_the_readme_are_those_of_the_results():
    readme = (ROOT / "README.md").read_text()
    assert benchmark_table.PLACE.findall(readme) == [benchmark_table.table()], (
        "python docs/benchmark_table.py writes them anew"
    )
    assert benchmark_table.table().count("\n") == len(benchmark_table.ROWS) + 1, "a case is gone"
