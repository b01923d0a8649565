"""The database: transactions that do not lose updates, guarded writes, migrations that match."""

import threading
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import text

from server.db.check import differences
from server.db.engine import Database
from server.db.migrate import upgrade
from server.db.queries import jobs as queries
from server.db.queries import leases, listing
from server.domain.job import NewJob
from server.domain.listing import ALL_JOBS
from server.domain.resources import GpuRef, Resources
from server.domain.states import JobState
from server.errors import StartupError, Unavailable
from server.services.snapshots import Snapshots

NOW = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
def database(tmp_path):
    made = Database(tmp_path / "eyas.db")
    upgrade(made.engine)
    yield made
    made.close()


def new_job(job_id, *needs):
    return NewJob(job_id, job_id, "validate", {"checkpoint": "/c"}, f"/out/{job_id}", NOW, needs)


def test_migrations_make_what_the_models_say():
    assert differences() == []


def test_settings_of_every_connection(database):
    with database.engine.connect() as connection:
        values = [
            connection.exec_driver_sql(f"PRAGMA {name}").scalar_one()
            for name in ("journal_mode", "foreign_keys", "busy_timeout")
        ]
    assert values == ["wal", 1, 15000]


def test_concurrent_read_then_write_loses_nothing(database):
    with database.write() as session:
        queries.insert_jobs(session, [new_job("counter")])

    def count():
        for _ in range(50):
            with database.write() as session:
                version = session.scalar(text("SELECT version FROM jobs"))
                session.execute(text("UPDATE jobs SET version = :new"), {"new": version + 1})

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with database.read() as session:
        assert session.scalar(text("SELECT version FROM jobs")) == 201


def test_a_write_that_fails_leaves_nothing(database):
    with pytest.raises(Unavailable), database.write() as session:
        queries.insert_jobs(session, [new_job("a"), new_job("b", "nowhere")])
    with database.read() as session:
        assert queries.unfinished_jobs(session) == []


def test_a_database_of_a_newer_program_is_refused(database):
    with database.engine.begin() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(StartupError, match="newer version"):
        upgrade(database.engine)


def test_jobs_come_back_as_they_were_stored(database):
    with database.write() as session:
        queries.insert_jobs(session, [new_job("last", "first"), new_job("first")])
    with database.read() as session:
        last, first = queries.unfinished_jobs(session)
        assert [job.id for job in listing.page(session, ALL_JOBS, 1)] == ["first"]
        assert (last.id, last.depends_on[0].id, first.created_at) == ("last", "first", NOW)
        assert queries.upstream_output_dirs(session, ["last"]) == {"/out/last", "/out/first"}
        assert queries.get_job(session, "absent") is None


def test_writes_are_guarded_by_the_state_they_were_read_in(database):
    with database.write() as session:
        queries.insert_jobs(session, [new_job("a"), new_job("b")])
    with database.read() as session:
        a, b = queries.unfinished_jobs(session)
    with database.write() as session:
        started = queries.begin_attempt(session, a, NOW)
    assert (started.state, started.attempt.number) == (JobState.STARTING, 1)
    for step in (lambda s: queries.begin_attempt(s, a, NOW), lambda s: queries.save(s, a, replace(a, waiting="x"))):
        with pytest.raises(queries.Stale), database.write() as session:
            step(session)
    with database.write() as session:
        assert queries.ask_cancel(session, "b", 5.0, NOW)
        assert not queries.ask_cancel(session, "b", 9.0, NOW + timedelta(seconds=1))
    with pytest.raises(queries.Stale), database.write() as session:
        queries.begin_attempt(session, b, NOW)
    with database.write() as session:
        saved = queries.save(session, started, replace(started, health="ok"))
    assert (saved.version, saved.health) == (started.version + 1, "ok")


def test_a_cancel_that_comes_while_an_end_is_judged_is_not_lost(database):
    with database.write() as session:
        queries.insert_jobs(session, [new_job("a")])
    with database.read() as session:
        [a] = queries.unfinished_jobs(session)
    with database.write() as session:
        started = queries.begin_attempt(session, a, NOW)
    with database.write() as session:
        assert queries.ask_cancel(session, "a", 5.0, NOW)
    ended = replace(started, state=JobState.FAILED, ended_at=NOW, reason="preempted")
    with pytest.raises(queries.Stale), database.write() as session:
        queries.save(session, started, ended)
    with database.read() as session:
        fresh = queries.get_job(session, "a")
    with database.write() as session:
        assert queries.save(session, fresh, replace(fresh, state=JobState.CANCELLED)).state == JobState.CANCELLED


def test_fault_19_wal_growth(database, tmp_path):
    """Readers that come and go between writes never keep the write-ahead log from starting over."""
    with database.write() as session:
        queries.insert_jobs(session, [new_job("a")])
    for number in range(600):
        with database.write() as session:
            session.execute(text("UPDATE jobs SET hint = :text"), {"text": str(number) * 2000})
        if number % 10 == 0:
            with database.read() as session:
                queries.unfinished_jobs(session)
    assert (tmp_path / "eyas.db-wal").stat().st_size < 16 << 20
    with database.engine.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA journal_size_limit").scalar_one() == 64 << 20


def test_snapshots_never_go_back(database):
    with database.write() as session:
        queries.insert_jobs(session, [new_job("a"), new_job("b")])
    with database.read() as session:
        a, b = queries.unfinished_jobs(session)
    snapshots = Snapshots(capacity=1)
    snapshots.put(replace(a, version=2, waiting="new"))
    assert b'"queued: new"' in snapshots.put(replace(a, version=1, waiting="old")).body
    snapshots.put(b)
    assert snapshots.get("a") is None


def test_a_gpu_has_one_holder_whatever_the_queue_decided(database):
    """The key of the table, not the queue, is what keeps a GPU from being handed out twice."""
    gpus = [GpuRef(index=str(number), uuid=f"GPU-{number}", name=None) for number in range(3)]
    with database.write() as session:
        queries.insert_jobs(session, [new_job("a"), new_job("b")])
        a, b = queries.unfinished_jobs(session)
        started = queries.begin_attempt(session, replace(a, resources=Resources(gpus=2)), NOW, gpus[:2])
        assert (started.attempt.gpus, started.resources.gpus) == (tuple(gpus[:2]), 2)
    with pytest.raises(queries.Stale), database.write() as session:
        queries.begin_attempt(session, b, NOW, gpus[1:])
    with database.write() as session:
        [_, b] = queries.unfinished_jobs(session)
        assert (b.state, b.attempt) == ("queued", None)
        assert {lease.uuid for lease in leases.every(session)} == {"GPU-0", "GPU-1"}
        assert leases.release(session, "a", 1) == 2
        queries.begin_attempt(session, b, NOW, gpus[1:])
    with database.read() as session:
        assert {lease.job_id for lease in leases.every(session)} == {"b"}
