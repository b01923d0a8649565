"""A copy of what no job directory can give back: the database, and the settings it was used with."""

import json
from pathlib import Path

from eagle3_core.contract.jobdir import write_whole
from server.db.backup import become_another, copy_database, faults_of
from server.errors import StartupError
from server.settings import Settings


def backup(settings: Settings, target: Path) -> list[Path]:
    """Write `eyas.db` and `settings.json` into a new or empty directory; a daemon may run meanwhile.

    Raises:
        StartupError: there is no database, it is damaged, or the directory holds files already.
        Unavailable: the database cannot be read.
        OSError: the directory cannot be written.
    """
    if not settings.database.is_file():
        raise StartupError(f"there is no database at {settings.database}")
    target.mkdir(parents=True, exist_ok=True)
    if any(target.iterdir()):
        raise StartupError(f"{target} is not empty; a backup does not mix with other files")
    copy = target / settings.database.name
    copy_database(settings.database, copy)
    if faults := faults_of(copy):
        raise StartupError(f"{settings.database} is damaged ({faults[0]}); `eyas rebuild` makes it anew")
    become_another(copy)
    told = target / "settings.json"
    write_whole(told, json.dumps(settings.model_dump(mode="json"), indent=1).encode() + b"\n", 0o600)
    return [copy, told]
