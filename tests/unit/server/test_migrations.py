"""Databases of every version that ever was come forward with what they hold."""

from datetime import UTC, datetime

import pytest
from alembic import command
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import Column, Text

from server.db.engine import Database
from server.db.migrate import condition, configuration, upgrade
from server.db.queries import jobs as queries
from server.domain.job import NewJob
from server.domain.resources import BY_STAGE
from server.errors import StartupError, Unavailable

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def test_a_database_of_before_policies_is_brought_forward(tmp_path):
    old = Database(tmp_path / "old.db")
    with old.engine.connect() as connection:
        config = configuration()
        config.attributes["connection"] = connection
        command.upgrade(config, "0001")
        connection.exec_driver_sql(
            "INSERT INTO jobs (id, name, stage, params, output_dir, created_at, state, status, version) VALUES "
            "('j', 'j', 'validate', '{}', '/o', '2026-01-01T00:00:00.000000Z', 'running', '{}', 1)"
        )
        connection.exec_driver_sql(
            "INSERT INTO attempts (job_id, number, state, event_offset, created_at) VALUES "
            "('j', 1, 'running', 7, '2026-01-01T00:00:00.000000Z')"
        )
        connection.commit()
    upgrade(old.engine)
    with old.engine.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA foreign_keys").scalar_one() == 1
        assert connection.exec_driver_sql("PRAGMA foreign_key_check").all() == []
    with old.read() as session:
        [job] = queries.unfinished_jobs(session)
    assert (job.policy.retry.max_retries, job.cancel_checkpoint, job.attempt.retries) == (2, True, 0)
    assert job.attempt.event_offset == 7
    assert (job.priority, job.resources, job.attempt.gpus) == (0, BY_STAGE, ())
    old.close()


def test_a_table_that_is_made_anew_loses_no_row_that_refers_to_it(tmp_path, monkeypatch):
    """What a later migration may do: without its foreign keys off, SQLite deletes every attempt with the old table."""
    database = Database(tmp_path / "eyas.db")
    upgrade(database.engine)
    with database.write() as session:
        queries.insert_jobs(session, [NewJob("j", "j", "validate", {}, "/o", NOW)])
        queries.begin_attempt(session, queries.unfinished_jobs(session)[0], NOW)

    def remake(config, _target):
        connection = config.attributes["connection"]
        operations = Operations(MigrationContext.configure(connection))
        with operations.batch_alter_table("jobs", recreate="always") as jobs:
            jobs.add_column(Column("further", Text()))

    monkeypatch.setattr(command, "upgrade", remake)
    upgrade(database.engine)
    with database.read() as session:
        [job] = queries.unfinished_jobs(session)
    assert job.attempt is not None
    database.close()


def at_revision(path, revision):
    database = Database(path)
    with database.engine.connect() as connection:
        config = configuration()
        config.attributes["connection"] = connection
        command.upgrade(config, revision)
        connection.commit()
    return database


def test_a_migration_leaves_a_copy_of_what_was_before(tmp_path):
    old = at_revision(tmp_path / "eyas.db", "0001")
    upgrade(old.engine)
    old.close()
    copy = tmp_path / "eyas.db.before-upgrade-from-0001"
    assert copy.stat().st_mode & 0o777 == 0o600
    kept = Database(copy)
    with kept.engine.connect() as connection:
        assert MigrationContext.configure(connection).get_current_revision() == "0001"
    kept.close()
    again = Database(tmp_path / "eyas.db")
    upgrade(again.engine)
    again.close()
    assert len(list(tmp_path.glob("*before*"))) == 1


def test_nothing_is_changed_when_there_is_no_room_for_the_copy(tmp_path):
    old = at_revision(tmp_path / "eyas.db", "0001")
    (tmp_path / "eyas.db.before-upgrade-from-0001").mkdir()  # nothing can take its place
    with pytest.raises(Unavailable, match="nothing was changed"):
        upgrade(old.engine)
    with old.engine.connect() as connection:
        assert MigrationContext.configure(connection).get_current_revision() == "0001"
    old.close()


def test_a_database_of_a_newer_version_is_refused(tmp_path):
    database = Database(tmp_path / "eyas.db")
    upgrade(database.engine)
    with database.engine.begin() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(StartupError, match=r"newer version \(revision 9999\); upgrade Eyas"):
        upgrade(database.engine)
    with pytest.raises(StartupError, match="newer version"):
        condition(database.engine)
    database.close()
