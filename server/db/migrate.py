"""Bring a database to the present schema; the configuration is here, there is no alembic.ini."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util.exc import CommandError
from sqlalchemy import Connection, Engine

import migrations
from server.db.backup import copy_database
from server.db.engine import translated
from server.errors import StartupError, Unavailable


def configuration() -> Config:
    """Alembic's, for the scripts in the package `migrations`."""
    config = Config()
    config.set_main_option("script_location", next(iter(migrations.__path__)))
    return config


@contextmanager
def _without_foreign_keys(connection: Connection) -> Iterator[None]:
    """A table that is made anew is dropped first, which with foreign keys on deletes every row that refers to it.

    The pragma does nothing within a transaction, and the driver's connection has none yet.
    """
    driver = connection.connection.driver_connection
    assert driver is not None
    driver.execute("PRAGMA foreign_keys=OFF")
    try:
        yield
    finally:
        connection.rollback()
        driver.execute("PRAGMA foreign_keys=ON")


def upgrade(engine: Engine) -> None:
    """Run the migrations this database lacks, after a copy of it was laid beside it.

    Raises:
        StartupError: the database was made by a newer version of the program.
        Unavailable: it is damaged, cannot be written, or the disk is full.
    """
    config = configuration()
    scripts = ScriptDirectory.from_config(config)
    with translated(), engine.connect() as connection, _without_foreign_keys(connection):
        present = MigrationContext.configure(connection).get_current_revision()
        connection.rollback()
        if present == scripts.get_current_head():
            return
        if present is not None:
            _refuse_newer(scripts, present)
            _copy_before(engine, present)
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
        connection.commit()


def condition(engine: Engine) -> str | None:
    """What the next start will do to the schema, or None when it is the present one.

    Raises:
        StartupError: the database was made by a newer version of the program.
        Unavailable: it cannot be read.
    """
    scripts = ScriptDirectory.from_config(configuration())
    with translated(), engine.connect() as connection:
        present = MigrationContext.configure(connection).get_current_revision()
    if present == scripts.get_current_head():
        return None
    if present is not None:
        _refuse_newer(scripts, present)
    return f"revision {present or 'none'}: `eyas serve` brings it to {scripts.get_current_head()}"


def _refuse_newer(scripts: ScriptDirectory, revision: str) -> None:
    try:
        scripts.get_revision(revision)
    except CommandError:
        text = f"the database is of a newer version (revision {revision}); upgrade Eyas, or go back to a backup"
        raise StartupError(text) from None


def _copy_before(engine: Engine, revision: str) -> None:
    """Keep the database as the version before left it: eyas.db.before-upgrade-from-0002."""
    path = Path(str(engine.url.database))
    copy = path.with_name(f"{path.name}.before-upgrade-from-{revision}")
    try:
        copy_database(path, copy)
    except OSError as error:
        raise Unavailable(f"{copy} cannot be written, nothing was changed: {error}") from error
