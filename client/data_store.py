"""`eyas data check` and `eyas data stats`: hidden states at the command line, without a daemon."""

import json
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Literal

import typer

from client.console import Json, fail, show_json
from client.data import data_app as data_app
from eagle3_core.contract.priority import be_nice


@data_app.command()
def check(
    path: Annotated[Path, typer.Argument(help="hidden-state store, or directory of hs_<row>.safetensors")],
    as_json: Json = False,
    form: Annotated[Literal["text", "json", "sarif"], typer.Option("--format")] = "text",
    level: Annotated[
        Literal["quick", "full"], typer.Option(help="quick: index and headers; full: every byte")
    ] = "full",
    prepared: Annotated[
        Path | None, typer.Option(help="output of the prepare job, or JSON rows of input_ids and loss_mask")
    ] = None,
    verifier: Annotated[Path | None, typer.Option(help="verifier directory the states should be of")] = None,
    slots: Annotated[int | None, typer.Option(min=1, help="states a token, the last one included")] = None,
    max_mb_per_s: Annotated[float | None, typer.Option(min=1, help="read no faster than that")] = None,
) -> None:
    """Judge hidden states: exit status 0 valid, 1 suspect, 2 invalid, 3 unreadable, 4 options that do not fit."""
    from client.checkpoint import EXIT_STATUS, MISUSED, show_verdict

    if level == "quick" and max_mb_per_s is not None:
        typer.echo("eyas: --level quick reads no state: --max-mb-per-s is for the other level", err=True)
        raise typer.Exit(MISUSED)
    from eagle3_core.checkpoint.sarif import to_sarif
    from eagle3_core.data_check.check import check_data

    if level != "quick":
        be_nice()  # a training beside it goes first
    verdict = check_data(
        path, level=level, prepared=prepared, verifier=verifier, slots=slots, max_mb_per_s=max_mb_per_s
    )
    if as_json or form == "json":
        print(json.dumps({key: value for key, value in verdict.to_dict().items() if key != "servers"}, indent=2))
    elif form == "sarif":
        print(json.dumps(to_sarif(verdict, path, version("eyas")), indent=2))
    else:
        show_verdict(path, verdict)
    raise typer.Exit(EXIT_STATUS[verdict.verdict])


@data_app.command()
def stats(
    path: Annotated[Path, typer.Argument(help="hidden-state store, or output of a prepare job")],
    as_json: Json = False,
    vocab_map: Annotated[
        Path | None, typer.Option("--map", help="directory of a vocab_map.safetensors; a prepare job's has one itself")
    ] = None,
) -> None:
    """Tell lengths, supervised share and the coverage of a draft vocabulary."""
    from eagle3_core.data_check.stats import Spread, stats_of
    from eagle3_core.errors import Eagle3Error

    try:
        found = stats_of(path, vocab_map)
    except (Eagle3Error, OSError) as error:
        raise fail(str(error)) from None
    if as_json:
        show_json(asdict(found))
        return

    def spread(title: str, of: Spread) -> str:
        return f"{title:<22}min {of.min}, median {of.median}, p95 {of.p95}, max {of.max}, sum {of.total:,}"

    lines = [
        f"{'rows':<22}{found.rows:,}",
        spread("tokens a row", found.length),
        spread("supervised a row", found.supervised),
        f"{'supervised share':<22}{found.supervised_share:.1%}; {found.rows_without_answer} rows without an answer",
        f"{'distinct tokens':<22}{found.distinct_tokens:,} in the answers",
    ]
    if found.coverage is not None:
        lines.append(
            f"{'draft vocabulary':<22}{found.draft_vocab_size:,} tokens cover {found.coverage:.2%} of the answers; "
            f"{found.unused_draft_tokens:,} of them occur in none"
        )
    typer.echo("\n".join(lines))
