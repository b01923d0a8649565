"""`eyas checkpoint`: the judge at the command line, without a daemon."""

import json
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from eagle3_core.checkpoint.findings import Level, Servability, Verdict
from eagle3_core.checkpoint.sarif import to_sarif
from eagle3_core.contract.plain import plain

Form = Literal["text", "json", "sarif"]

EXIT_STATUS = {"valid": 0, "suspect": 1, "invalid": 2, "unreadable": 3}
"""Exit status of `eyas checkpoint verify`."""

MISUSED = 4
"""Exit status for options that do not go together; nothing was judged."""

_STYLES = {"valid": "green", "suspect": "yellow", "invalid": "red", "unreadable": "red"}
_SEVERITY_STYLES = {"error": "red", "warning": "yellow", "info": "dim"}
_OUTCOMES = {"loads": "[green]loads[/]", "loads_wrongly": "[red]loads wrongly[/]", "refuses": "[red]refuses[/]"}


def verify(
    path: Path,
    form: Form = "text",
    *,
    level: Level = "full",
    previous: Path | None = None,
    verifier: Path | None = None,
    store: Path | None = None,
    servers: bool = False,
    max_mb_per_s: float | None = None,
) -> int:
    """Judge a checkpoint and print the verdict; returns the exit status.

    Args:
        path: checkpoint directory, output directory of a training, or one weight file.
        form: text for people; json; SARIF 2.1 for CI.
        level: how far to look.
        previous: checkpoint of the epoch before.
        verifier: directory of the verifier.
        store: hidden-state store, for level deep.
        servers: say in text what each server would do with it; json always does.
        max_mb_per_s: read no faster than that.
    """
    verdict = _judge(path, level, previous, verifier, store, max_mb_per_s)
    if form == "json":
        print(json.dumps(verdict.to_dict(), indent=2))
    elif form == "sarif":
        print(json.dumps(to_sarif(verdict, path, version("eyas")), indent=2))
    else:
        show_verdict(path, verdict)
        if servers:
            show_servers(verdict.servers)
    return EXIT_STATUS[verdict.verdict]


def misuse(
    level: Level, previous: Path | None, verifier: Path | None, store: Path | None, max_mb_per_s: float | None
) -> str | None:
    """What is wrong with a choice of options, if anything."""
    if level == "deep" and (store is None or verifier is None):
        return "--level deep needs --store and --verifier"
    if level != "deep" and store is not None:
        return "--store is for --level deep"
    if level == "quick" and (previous is not None or max_mb_per_s is not None):
        return "--level quick reads no tensor: --previous and --max-mb-per-s are for the other levels"
    return None


def _judge(
    path: Path,
    level: Level,
    previous: Path | None,
    verifier: Path | None,
    store: Path | None,
    max_mb_per_s: float | None,
) -> Verdict:
    if level == "quick":
        from eagle3_core.checkpoint.quick import judge_quick  # without torch

        return judge_quick(path, verifier=verifier)
    if level == "deep":
        from eagle3_core.deep import judge_deep

        assert verifier is not None and store is not None, "the command asks for both"
        return judge_deep(path, verifier=verifier, store=store, previous=previous, max_mb_per_s=max_mb_per_s)
    from eagle3_core.checkpoint.judge import judge

    return judge(path, previous=previous, verifier=verifier, max_mb_per_s=max_mb_per_s)


def show_verdict(path: Path, verdict: Verdict) -> None:
    """Print the verdict, and a table of the findings."""
    console = Console()
    console.print(f"[bold {_STYLES[verdict.verdict]}]{verdict.verdict}[/]  {escape(plain(str(path)))}")
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


def show_servers(servers: tuple[Servability, ...]) -> None:
    """Print a table: what each server does, and why."""
    console = Console()
    table = Table(show_edge=False, pad_edge=False)
    for title in ("server", "what it does", "why, and what to do"):
        table.add_column(title, overflow="fold")
    for server in servers:
        reasons = [
            f"{'' if reason.effect != 'note' else 'note: '}{escape(reason.message)} "
            f"[dim]({reason.rule}: {escape(reason.source)}; {reason.proof})[/]\n[dim]{escape(reason.fix)}[/]"
            for reason in server.reasons
        ]
        table.add_row(escape(server.version), _OUTCOMES[server.outcome], "\n".join(reasons))
        table.add_section()
    console.print(table)
