"""What every command needs: a client, an error that ends it, and JSON."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from client.http import ApiError, EyasClient, Unreachable
from eagle3_core.contract.plain import plain

State = Annotated[Path | None, typer.Option("--state", help="state directory of the daemon")]
Json = Annotated[bool, typer.Option("--json", help="print the answer as JSON")]

Limit = Annotated[int, typer.Option(help="how many; 1000 at most")]
Cursor = Annotated[str | None, typer.Option(help="go on behind the page that named it")]


@contextmanager
def connected(state: Path | None, status: int = 1) -> Iterator[EyasClient]:
    """A client; refusals and a missing daemon end the command with a clear text and this exit status."""
    try:
        with EyasClient.of_environment(state) as client:
            client.on_trouble = note
            yield client
    except Unreachable as error:
        raise fail(str(error), status) from None
    except ApiError as error:
        for field in error.fields:
            typer.echo(f"{field['pointer'] or '/'}: {field['message']}", err=True)
        raise fail(str(error) if not error.fields else str(error.problem.get("title")), status) from None


def fail(message: str, status: int = 1) -> typer.Exit:
    """Print an error; returns what to raise."""
    note(message)
    return typer.Exit(status)


def note(message: str) -> None:
    """Tell a person something that is no part of the output."""
    typer.echo(plain(f"eyas: {message}"), err=True)


def tell_of_more(page: Mapping[str, Any]) -> None:
    """Say how to see older entries, where there are any."""
    if page["next_cursor"] is not None:
        note(f"there are older ones: --limit N, or --cursor {page['next_cursor']}")


def show_json(value: Any) -> None:
    """Print a value as indented JSON."""
    typer.echo(json.dumps(value, indent=1, ensure_ascii=False))
