"""`eyas checkpoint`: the judge at the command line, without a daemon."""

import json
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from eagle3_core.checkpoint.findings import Verdict
from eagle3_core.checkpoint.judge import judge

EXIT_STATUS = {"valid": 0, "suspect": 1, "invalid": 2, "unreadable": 3}
"""Exit status of `eyas checkpoint verify`."""

_STYLES = {"valid": "green", "suspect": "yellow", "invalid": "red", "unreadable": "red"}
_SEVERITY_STYLES = {"error": "red", "warning": "yellow", "info": "dim"}


def verify(path: Path, json_output: bool, previous: Path | None = None, verifier: Path | None = None) -> int:
    """Judge a checkpoint and print the verdict; returns the exit status.

    Args:
        path: checkpoint directory, output directory of a training, or one weight file.
        json_output: print `{"verdict", "findings"}` and nothing else.
        previous: checkpoint of the epoch before.
        verifier: directory of the verifier.
    """
    verdict = judge(path, previous=previous, verifier=verifier)
    if json_output:
        print(json.dumps(verdict.to_dict(), indent=2))
    else:
        _show(path, verdict)
    return EXIT_STATUS[verdict.verdict]


def _show(path: Path, verdict: Verdict) -> None:
    console = Console()
    console.print(f"[bold {_STYLES[verdict.verdict]}]{verdict.verdict}[/]  {escape(str(path))}")
    if not verdict.findings:
        return
    table = Table(show_edge=False, pad_edge=False)
    for title in ("finding", "where", "what, and what to do"):
        table.add_column(title, overflow="fold")
    for finding in verdict.findings:
        style = _SEVERITY_STYLES[finding.severity]
        where = "\n".join(part for part in (finding.file, finding.tensor) if part)
        text = escape(finding.message) + (f"\n[dim]{escape(finding.hint)}[/]" if finding.hint else "")
        table.add_row(f"[{style}]{finding.severity}[/]\n{finding.code}", escape(where), text)
        table.add_section()
    console.print(table)
