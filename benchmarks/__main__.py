"""All benchmarks, goal by goal: what is measured, what the goal is, whether it is met.

    make bench
    make bench BENCH_ARGS="--quick"                    # small sizes: shows that all of it runs
    python -m benchmarks overhead training_step        # some of them

Each runs in a process of its own, with its own number of cores and devices, one after another. A
full run of all of them writes benchmarks/results.md (other runs only with --out).
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks._bench import Row, table

HERE = pathlib.Path(__file__).parent
GOALS = {  # module: number of the goal
    "evaluations": 1,
    "overhead": 2,
    "against_serial": 3,
    "peers": 4,
    "training_step": 5,
    "two_devices": 6,
    "compile_time": 7,
    "batch_intervals": 8,
    "gpu": 9,
}


PATIENCE = 600.0  # seconds without a row after which a benchmark is stopped


@dataclasses.dataclass
class Result:
    name: str
    rows: list[Row]
    seconds: float = 0.0

    @property
    def title(self) -> str:
        doc = importlib.import_module(f"benchmarks.{self.name}").__doc__ or ""
        return f"{GOALS[self.name]}. {doc.splitlines()[0].rstrip('.')}"

    @property
    def limits(self) -> str:
        """What limits a goal that isn't met, in the benchmark's own words."""
        missed = any(row.met is False for row in self.rows)
        text = getattr(importlib.import_module(f"benchmarks.{self.name}"), "LIMITS", "")
        return " ".join(text.split()) if missed else ""


def rows_of(name: str, quick: bool) -> Iterator[Row]:
    """The rows of one benchmark, as its process measures them."""
    command = [sys.executable, "-m", f"benchmarks.{name}", "--json", *["--quick"] * quick]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=HERE.parent
        )
        watch = threading.Timer(PATIENCE, process.kill)
        watch.start()
        try:
            for line in process.stdout or ():
                watch.cancel()
                yield Row(**json.loads(line))
                watch = threading.Timer(PATIENCE, process.kill)
                watch.start()
            process.wait()
        finally:
            watch.cancel()
            process.kill()  # if this was interrupted
            process.wait()
        if process.returncode:
            errors.seek(0)
            last = (errors.read().strip().splitlines() or ["no message"])[-1]
            yield Row(f"{name} stopped", "", f"exit code {process.returncode}", "", False, last)


def measure(names: list[str], quick: bool, console: Console) -> list[Result]:
    results = []
    columns = (
        BarColumn(24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=len(names))
        for name in names:
            progress.update(task, description=name)
            result, begin = Result(name, []), time.perf_counter()
            for row in rows_of(name, quick):
                result.rows.append(row)
                progress.update(task, description=f"{name}: {row.case}")
            result.seconds = time.perf_counter() - begin
            results.append(result)
            title = f"{result.title} ({result.seconds:.0f} s)"
            progress.console.print(table(title, result.rows))
            progress.advance(task)
    return results


def processor() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((l.split(":", 1)[1].strip() for l in lines if l.startswith("model name")), "")


def version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def revision() -> str:
    out = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, cwd=HERE
    )
    return out.stdout.strip() or "unknown revision"


def machine() -> list[str]:
    memory = ""
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
        memory = f", {pages * size / 2**30:.0f} GiB"
    versions = ", ".join(f"{p} {version_of(p)}" for p in ("jax", "jaxlib", "flax", "numpy"))
    load = f", load {os.getloadavg()[0]:.1f} when it ended" if hasattr(os, "getloadavg") else ""
    return [
        f"- {processor()}, {os.cpu_count()} cores{memory}, {platform.system()}{load}",
        f"- Python {platform.python_version()}, {versions}",
        f"- jaxbraid {version_of('jaxbraid')} at {revision()}",
    ]


def markdown(results: list[Result], started: datetime.datetime, quick: bool) -> str:
    results = sorted(results, key=lambda result: GOALS[result.name])
    took = sum(result.seconds for result in results) / 60
    lines = [
        "# Results of `make bench`",
        "",
        f"{started:%Y-%m-%d %H:%M} UTC, {took:.0f} minutes."
        + (" A quick run: small sizes, which goals are not meant for." if quick else ""),
        "",
        *machine(),
        "",
        "Programs that are compared take turns in one process on one core unless the goal says "
        "otherwise; the shortest time of each counts, after compiling. Recorded times were taken "
        "on another day on a machine of this kind.",
        "",
        "| goal | rows | met |",
        "|---|---|---|",
    ]
    for result in results:
        with_goal = [row for row in result.rows if row.met is not None]
        met = f"{sum(bool(row.met) for row in with_goal)} of {len(with_goal)}"
        lines.append(f"| {result.title} | {len(result.rows)} | {met if with_goal else '–'} |")
    for result in results:
        lines += ["", f"## {result.title}", "", "| case | times | measured | goal | met |"]
        lines.append("|---|---|---|---|---|")
        for row in result.rows:
            met = {None: "", True: "yes", False: "**no**"}[row.met]
            cells = row.case, row.times, row.measured, row.goal, met
            lines.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
        if result.limits:
            lines += ["", f"What limits it: {result.limits}"]
        notes = [f"- {row.case}: {row.note}" for row in result.rows if row.note]
        if notes:
            lines += ["", *notes]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(GOALS))
    parser.add_argument("--quick", action="store_true", help="small sizes, a few repeats")
    parser.add_argument("--out", type=pathlib.Path, help="file to write the results to")
    given = parser.parse_args()
    for name in given.names:
        if name not in GOALS:
            parser.error(f"{name!r} is none of {', '.join(GOALS)}.")
    out = given.out
    if out is None and not given.names and not given.quick:
        out = HERE / "results.md"
    console = Console()
    started = datetime.datetime.now(datetime.UTC)
    results = measure(given.names or list(GOALS), given.quick, console)
    missed = [f"{r.title}: {row.case}" for r in results for row in r.rows if row.met is False]
    verdict = f"{len(missed)} goals are not met" + ":" * bool(missed)
    console.print("A quick run judges no goal." if given.quick else verdict)
    for line in missed:
        console.print(f"  {line}", soft_wrap=True, highlight=False)
    if out is not None:
        out.write_text(markdown(results, started, given.quick))
        console.print(f"results: {out}", soft_wrap=True)
    if any("stopped" in row.case for result in results for row in result.rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
