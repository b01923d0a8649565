"""`python -P -m server.db.check`: an empty database upgrades, and then differs in nothing from the models."""

import sys
import tempfile
from pathlib import Path

from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext

from server.db.engine import Database
from server.db.migrate import upgrade
from server.db.models import Base


def differences() -> list[object]:
    """What the models have and the migrations do not make, or the other way round."""
    with tempfile.TemporaryDirectory() as folder:
        database = Database(Path(folder) / "check.db")
        upgrade(database.engine)
        with database.engine.connect() as connection:
            context = MigrationContext.configure(connection, opts={"compare_type": True})
            found = list(compare_metadata(context, Base.metadata))
        database.close()
    return found


def main() -> int:
    """Print the differences; returns the exit code."""
    found = differences()
    for difference in found:
        sys.stderr.write(f"models and migrations differ: {difference}\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
