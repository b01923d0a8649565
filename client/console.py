"""What every command needs: a client, an error that ends it, and JSON."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from client.http import ApiError, EyasClient, Unreachable

State = Annotated[Path | None, typer.Option("--state", help="state directory of the daemon")]
Json = Annotated[bool, typer.Option("--json", help="print the answer as JSON")]


@contextmanager
def connected(state: Path | None) -> Iterator[EyasClient]:
    """A client; refusals and a missing daemon end the command with a clear text."""
    try:
        with EyasClient.of_environment(state) as client:
            yield client
    except Unreachable as error:
        raise fail(str(error)) from None
    except ApiError as error:
        for field in error.fields:
            typer.echo(f"{field['pointer'] or '/'}: {field['message']}", err=True)
        raise fail(str(error) if not error.fields else str(error.problem.get("title"))) from None


def fail(message: str) -> typer.Exit:
    """Print an error; returns what to raise."""
    typer.echo(f"eyas: {message}", err=True)
    return typer.Exit(1)


def show_json(value: Any) -> None:
    """Print a value as indented JSON."""
    typer.echo(json.dumps(value, indent=1, ensure_ascii=False))
