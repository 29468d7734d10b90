"""What a check has found, in words."""

from __future__ import annotations

import dataclasses
import textwrap
from typing import Literal

Status = Literal["ok", "warning", "error"]


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that was checked.

    - `name`: what was checked, such as `"step on level 0: gradient"`.
    - `status`: `"ok"`; `"warning"`: works, but perhaps not as it's meant; `"error"`: is wrong.
    - `text`: a sentence or two: what is the case and, where it's wrong, what to do.
    - `value`: the number that was measured, if there is one.
    """

    name: str
    status: Status
    text: str
    value: float | None = None


@dataclasses.dataclass(frozen=True)
class Report:
    """All findings of `check_problem`. `print` it for a table; `report["name"]` is one of them."""

    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether there is no error. Warnings don't count."""
        return not self.errors

    @property
    def errors(self) -> tuple[Finding, ...]:
        """What is wrong."""
        return tuple(f for f in self.findings if f.status == "error")

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """What may not be as it's meant."""
        return tuple(f for f in self.findings if f.status == "warning")

    def raise_if_failed(self) -> None:
        """Raise `ValueError` with the text of all errors, if there are any."""
        if not self.ok:
            raise ValueError("\n".join(f"{f.name}: {f.text}" for f in self.errors))

    def __getitem__(self, name: str) -> Finding:
        for finding in self.findings:
            if finding.name == name:
                return finding
        raise KeyError(f"{name!r}: must be one of {[f.name for f in self.findings]}.")

    def __str__(self) -> str:
        wide = max((len(f.name) for f in self.findings), default=0)
        lines = []
        for f in self.findings:
            first, *rest = textwrap.wrap(f.text, 72) or [""]
            lines.append(f"{f.status:7}  {f.name:{wide}}  {first}")
            lines += [" " * (wide + 11) + line for line in rest]
        lines.append(f"{len(self.errors)} errors, {len(self.warnings)} warnings")
        return "\n".join(lines)
