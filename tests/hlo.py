"""Collectives of a compiled program, counted as it runs: loops as often as they turn."""

from __future__ import annotations

import collections
import math
import re

BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "f32": 4, "s32": 4, "u32": 4, "f64": 8}
COLLECTIVES = ("collective-permute", "all-reduce", "all-gather")
INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = (.*?) ([\w\-]+)\(")
CALLED = re.compile(
    r"(?:to_apply|calls|body|condition|true_computation|false_computation)=%?([\w.\-]+)"
)


def size(shape: str) -> int:
    """Bytes of a shape such as `f64[2,3]{1,0}` or of a tuple of them."""
    return sum(
        BYTES[kind] * math.prod(int(n) for n in dims.split(",") if n)
        for kind, dims in re.findall(r"\b([a-z]+\d*)\[([\d,]*)\]", shape)
    )


def collectives(text: str) -> dict[str, tuple[int, int]]:
    """`{kind: (how many are run, bytes of their results on a device)}` of a compiled module.

    A condition's branches are all counted; a loop must say how often it turns.
    """
    computations: dict[str, list[str]] = {}
    entry, lines = "", []
    for line in text.splitlines():
        head = re.match(r"^(ENTRY )?%?([\w.\-]+) .*\{$", line)
        if head:
            lines = computations[head[2]] = []
            entry = head[2] if head[1] else entry
        else:
            lines.append(line)

    def count(name: str) -> collections.Counter[tuple[str, str]]:
        total: collections.Counter[tuple[str, str]] = collections.Counter()
        for line in computations[name]:
            found = INSTRUCTION.match(line)
            if not found:
                continue
            shape, op = found.groups()
            op = op.removesuffix("-start")
            if op in COLLECTIVES:
                total[op, "count"] += 1
                total[op, "bytes"] += size(shape)
            inner: collections.Counter[tuple[str, str]] = collections.Counter()
            branches = re.search(r"branch_computations=\{([^}]*)\}", line)
            called = CALLED.findall(line) if op not in COLLECTIVES else []
            called += re.findall(r"[\w.\-]+", branches[1]) if branches else []
            for other in called:
                inner.update(count(other))
            if inner:
                times = 1
                if op == "while":
                    known = re.search(r'"known_trip_count":\{"n":"(\d+)"', line)
                    assert known, f"a loop with collectives does not say how often it turns: {line}"
                    times = int(known[1])
                total.update({k: v * times for k, v in inner.items()})
        return total

    total = count(entry)
    return {kind: (total[kind, "count"], total[kind, "bytes"]) for kind in COLLECTIVES}
