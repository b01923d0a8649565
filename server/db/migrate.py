"""Bring a database to the present schema; the configuration is here, there is no alembic.ini."""

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util.exc import CommandError
from sqlalchemy import Engine

import migrations
from server.db.engine import translated
from server.errors import StartupError


def configuration() -> Config:
    """Alembic's, for the scripts in the package `migrations`."""
    config = Config()
    config.set_main_option("script_location", next(iter(migrations.__path__)))
    return config


def upgrade(engine: Engine) -> None:
    """Run the migrations this database lacks.

    Raises:
        StartupError: the database was made by a newer version of the program.
        Unavailable: it is damaged, cannot be written, or the disk is full.
    """
    config = configuration()
    with translated(), engine.connect() as connection:
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
