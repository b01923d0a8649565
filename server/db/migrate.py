"""Bring a database to the present schema; the configuration is here, there is no alembic.ini."""

from collections.abc import Iterator
from contextlib import contextmanager

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util.exc import CommandError
from sqlalchemy import Connection, Engine

import migrations
from server.db.engine import translated
from server.errors import StartupError


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
    """Run the migrations this database lacks.

    Raises:
        StartupError: the database was made by a newer version of the program.
        Unavailable: it is damaged, cannot be written, or the disk is full.
    """
    config = configuration()
    with translated(), engine.connect() as connection, _without_foreign_keys(connection):
        present = MigrationContext.configure(connection).get_current_revision()
        if present is not None:
            try:
                ScriptDirectory.from_config(config).get_revision(present)
            except CommandError:
                raise StartupError(f"the database is of a newer version (revision {present}); upgrade Eyas") from None
        connection.rollback()
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
        connection.commit()
