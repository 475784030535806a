"""`raykv doctor`: what the doctor found, for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from raykv.protocol.findings import Finding, Severity

_MARKS = {
    Severity.OK: ("ok  ", "green"),
    Severity.WARN: ("warn", "yellow"),
    Severity.FAIL: ("FAIL", "bold red"),
}


def print_findings(findings: Sequence[Finding], console: Console | None = None) -> None:
    """One line for each, and what to do below those that need it."""
    console = console or Console()
    for finding in findings:
        mark, style = _MARKS[finding.severity]
        line = Text.assemble((mark, style), f"  {finding.check:<10}  {finding.what}")
        console.print(line, soft_wrap=True)
        if finding.mend:
            console.print(Text(f"                  → {finding.mend}", style="dim"), soft_wrap=True)


def exit_code(findings: Sequence[Finding]) -> int:
    """1 when something is wrong; warnings are allowed."""
    return int(any(finding.severity is Severity.FAIL for finding in findings))
