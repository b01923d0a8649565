"""`eyas data`: what conversations, prepared rows and hidden-state stores hold, without a daemon."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from client.console import Json, fail, show_json
from eagle3_core.contract.plain import plain

if TYPE_CHECKING:
    from worker.preview import PreviewRow

data_app = typer.Typer(
    help="Conversations, prepared rows and hidden-state stores, without a daemon.", no_args_is_help=True
)

TRAINED = ("«", "»")
"""Around what is trained on, where there is no colour."""


@data_app.command()
def preview(
    path: Annotated[Path, typer.Argument(help="file of conversations, prepared directory or hidden-state store")],
    verifier: Annotated[
        Path | None, typer.Option(help="whose tokenizer and template; a file of conversations needs it")
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="how many")] = 3,
    row: Annotated[int | None, typer.Option(min=0, help="the first: line of a file, row of a directory from 0")] = None,
    max_seq_len: Annotated[int | None, typer.Option(min=1, help="cut rows of a file as prepare would")] = None,
    allow_remote_code: Annotated[
        bool, typer.Option("--allow-remote-code", help="run Python code that lies in the verifier's directory")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show rows, and what of each is trained on: green, or between « and » where there is no colour."""
    from eagle3_core.errors import Eagle3Error
    from worker.preview import preview as rows_of

    try:
        found = rows_of(path, verifier, row, rows, max_seq_len, allow_remote_code)
        if as_json:
            show_json({"rows": [asdict(one) for one in found]})
        else:
            show_rows(found)
    except (Eagle3Error, OSError) as error:
        raise fail(str(error)) from None


def show_rows(rows: "Iterator[PreviewRow]") -> None:
    """Print rows for a person."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    for row in rows:
        console.print(Text(f"row {row.row}: {row.tokens} tokens, {row.supervised} trained on", style="bold"))
        if row.left_out is not None:
            console.print(Text(plain(f"left out: {row.left_out}"), style="red"))
        text = Text()
        for part, trained in row.parts:
            text.append(marked(part, trained and not console.color_system), style="green" if trained else "dim")
        console.print(text)


def marked(part: str, with_signs: bool) -> str:
    """A part of a row's text, harmless to a terminal, between signs if so wished."""
    return f"{TRAINED[0]}{plain(part)}{TRAINED[1]}" if with_signs else plain(part)
