"""Commands on the host itself: backup, rebuild, doctor. They read the state directory and need no running daemon."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
from pydantic import ValidationError

from server.errors import StartupError, Unavailable
from server.services import backup as backups
from server.services import doctor as doctors
from server.services import rebuild as rebuilds
from server.settings import Settings, faults_of


def backup(state: Path | None, target: Path) -> None:
    """Write a backup and say where."""
    with _settings(state) as settings:
        for path in backups.backup(settings, target):
            typer.echo(f"{path}  {path.stat().st_size} bytes")


def rebuild(state: Path | None) -> int:
    """Make the database anew; 1 when a job directory could not be read."""
    with _settings(state) as settings:
        found = rebuilds.rebuild(settings)
    typer.echo(f"{found.jobs} jobs ({found.unfinished} unfinished), {found.attempts} attempts, {found.events} events")
    if found.kept is not None:
        typer.echo(f"the database before is {found.kept}")
    for table in found.lost:
        typer.echo(f"warning: {table} could not be taken over from it", err=True)
    for path, why in found.left_out.items():
        typer.echo(f"left out: {path}: {why}", err=True)
    return 1 if found.left_out else 0


def doctor(state: Path | None, as_json: bool) -> int:
    """Print every check; 1 when one has failed."""
    failed = False
    checks = []
    with _settings(state) as settings:
        for check in doctors.examine(settings):
            failed |= check.level == "fail"
            checks.append(vars(check))
            if not as_json:
                typer.echo(f"{check.level:<5} {check.name:<9} {check.text}")
                if check.hint is not None:
                    typer.echo(f"{'':<15} {check.hint}")
    if as_json:
        typer.echo(json.dumps({"checks": checks}, indent=1, ensure_ascii=False))
    return 1 if failed else 0


@contextmanager
def _settings(state: Path | None) -> Iterator[Settings]:
    """The daemon's settings; what hinders the command ends it with a clear text."""
    try:
        yield Settings.model_validate({} if state is None else {"state": state})
    except ValidationError as error:
        raise _end("; ".join(faults_of(error))) from None
    except (StartupError, OSError) as error:
        raise _end(str(error)) from None
    except Unavailable as error:
        raise _end(error.detail) from None


def _end(message: str) -> typer.Exit:
    typer.echo(f"eyas: {message}", err=True)
    return typer.Exit(1)
