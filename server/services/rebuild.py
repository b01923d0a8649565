"""The database made anew from the job directories, which hold the truth.

    record.json, spec.json  -->  what was asked and decided      one row a job, under the number it had
    attempts/1..n           -->  replayed one after the other    through the same `observe` and `advance` as the loop's
                                 |- events.jsonl                 events, checkpoints, status
                                 `- exit.json                    how it ended
    record.json of an ended job has the last word on its end

It is written beside the old database and takes its place when it is complete; the old one is kept.
"""

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from eagle3_core.contract.events import Event
from eagle3_core.contract.jobdir import JobDir, fsync_directory, read_json
from server.db.engine import Database
from server.db.migrate import upgrade
from server.db.queries import events as event_queries
from server.db.queries import jobs as job_queries
from server.db.queries import restore
from server.domain.advance import advance, finish, stop_asked
from server.domain.job import Attempt, Dependency, Job
from server.domain.outcome import End
from server.domain.states import FINAL_JOB, LIVE_ATTEMPT, AttemptState, JobState
from server.errors import StartupError
from server.services.observer import NeverBegan, observe
from server.services.records import read_record
from server.settings import Settings
from server.system import clock, locks

logger = logging.getLogger(__name__)

NO_HURRY_S = float("inf")
"""Health is for the loop to judge."""

SIGNAL = "signal"
"""What a shim notes when the stop came from outside Eyas."""

Events = Sequence[tuple[Event, str]]


@dataclass
class Rebuilt:
    """What a rebuild found.

    Attributes:
        jobs, unfinished, attempts, events: how many there are now.
        left_out: directory -> why its job could not be read.
        lost: tables of the old database that could not be taken over.
        kept: where the old database is now, if there was one.
    """

    jobs: int = 0
    unfinished: int = 0
    attempts: int = 0
    events: int = 0
    left_out: dict[str, str] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    kept: Path | None = None


def rebuild(settings: Settings) -> Rebuilt:
    """Make the database anew. Running jobs are not touched; the next daemon adopts them.

    Raises:
        StartupError: a daemon uses the state directory, or there are no job directories.
        Unavailable: the new database cannot be written.
        OSError: neither can the state directory.
    """
    if not settings.jobs_dir.is_dir():
        raise StartupError(f"{settings.jobs_dir} does not exist; there is nothing to rebuild from")
    lock = locks.take(settings.state / "daemon.lock")
    if lock is None:
        raise StartupError(f"{settings.state} is in use by a daemon; stop it first (running jobs go on)")
    new = settings.database.with_name(f".{settings.database.name}.new")
    try:
        new.unlink(missing_ok=True)
        new.touch(mode=0o600)
        database = Database(new)
        try:
            upgrade(database.engine)
            found = _fill(settings, database)
        finally:
            database.close()
        found.lost = restore.copy_the_rest(settings.database, new)
        found.kept = _put_in_place(settings.database, new)
        return found
    finally:
        for name in (new.name, f"{new.name}-wal", f"{new.name}-shm"):
            new.with_name(name).unlink(missing_ok=True)
        locks.release(lock)


def unknown_jobs(settings: Settings, database: Database) -> tuple[list[str], bool]:
    """Ids of job directories that the database does not know, and whether it knows any job at all."""
    with database.read() as session:
        known = job_queries.all_ids(session)
    found = [entry.name for entry in os.scandir(settings.jobs_dir) if entry.name not in known and entry.is_dir()]
    return sorted(found), bool(known)


def refuse_lost_database(settings: Settings, database: Database) -> None:
    """A daemon over an empty database would take every job that runs for one that never was.

    Raises:
        StartupError: there are job directories, and the database knows no job.
    """
    unknown, any_known = unknown_jobs(settings, database)
    if unknown and not any_known:
        text = f"{settings.database} knows no job, but {settings.jobs_dir} holds {len(unknown)}"
        raise StartupError(f"{text}; `eyas rebuild --state {settings.state}` makes it anew from them")
    if unknown:
        names = ", ".join(unknown[:5]) + (" ..." if len(unknown) > 5 else "")
        logger.warning(
            "%d job directories are not in the database (%s): a submit that was cut off, or an older backup that was"
            " put back; with the daemon stopped, `eyas rebuild` brings them in",
            len(unknown),
            names,
        )


def _put_in_place(database: Path, new: Path) -> Path | None:
    kept = None
    if database.exists():
        stamp = clock.utc_now().strftime("%Y%m%dT%H%M%S")
        kept = database.with_name(f"{database.name}.before-rebuild-{stamp}")
        for end in ("", "-wal", "-shm"):
            part = database.with_name(database.name + end)
            if part.exists():
                part.replace(kept.with_name(kept.name + end))
    new.replace(database)
    fsync_directory(database.parent)
    return kept


def _fill(settings: Settings, database: Database) -> Rebuilt:
    found = Rebuilt()
    jobs = _read_all(settings.jobs_dir, found)
    with database.write() as session:
        restore.insert_jobs(session, jobs)
        for job in jobs:
            store = partial(event_queries.record, session, job.id)
            replay = _Replay(JobDir(settings.jobs_dir / job.id), job, store)
            ended = replay.run()
            for attempt, created_at, exit_record in replay.attempts:
                restore.insert_attempt(session, job.id, attempt, created_at, exit_record)
            restore.update_job(session, ended)
            found.attempts += len(replay.attempts)
            found.events += replay.events
            found.unfinished += ended.state not in FINAL_JOB
    found.jobs = len(jobs)
    return found


def _read_all(jobs_dir: Path, found: Rebuilt) -> list[Job]:
    """Every job whose directory can be read, oldest first, with the ends of what it waits for."""
    jobs: dict[str, Job] = {}
    for entry in sorted(os.scandir(jobs_dir), key=lambda entry: entry.name):
        try:
            jobs[entry.name] = read_record(JobDir(Path(entry.path)))
        except (OSError, ValueError, KeyError, TypeError) as error:
            found.left_out[entry.path] = f"{type(error).__name__}: {error}"
    for job_id, job in list(jobs.items()):
        needs = tuple(
            Dependency(needed.id, jobs[needed.id].name, jobs[needed.id].state, jobs[needed.id].reason)
            for needed in job.depends_on
            if needed.id in jobs
        )
        jobs[job_id] = replace(job, depends_on=needs)
    return _numbered(sorted(jobs.values(), key=lambda job: (job.created_at, job.number)))


def _numbered(jobs: Sequence[Job]) -> list[Job]:
    """Jobs under the numbers they had, and where two have the same one, the later ones under higher ones."""
    found: list[Job] = []
    for job in jobs:
        least = found[-1].number + 1 if found else 1
        found.append(replace(job, number=max(job.number, least)))
    return found


class _Replay:
    """The attempts of one job, one after the other, as the loop would have seen them."""

    def __init__(self, directory: JobDir, recorded: Job, store: Callable[[int, Events], None]) -> None:
        self._directory = directory
        self._recorded = recorded
        self._store = store
        self.attempts: list[tuple[Attempt, datetime, dict[str, Any] | None]] = []
        self.events = 0

    def run(self) -> Job:
        """The job as its directory tells it."""
        recorded = self._recorded
        job = replace(recorded, state=JobState.QUEUED, cancel_asked_at=None, pause_asked_at=None, ended_at=None)
        numbers = self._directory.attempt_numbers()
        for number in numbers[:-1]:
            job = self._ended_attempt(job, number)
        job = replace(job, cancel_asked_at=recorded.cancel_asked_at, pause_asked_at=recorded.pause_asked_at)
        if numbers:
            job = self._last_attempt(job, numbers[-1])
        if recorded.state in FINAL_JOB:
            return replace(recorded, status=job.status, attempt=job.attempt)
        return job if job.attempt is not None else replace(job, state=job.derived_state)

    def _ended_attempt(self, job: Job, number: int) -> Job:
        """One that was followed by another: the orders that lie there now were not meant for it."""
        job, record = _begun(job, number), self._exit(number)
        word = (record or {}).get("stop_asked")
        if isinstance(word, str) and word != SIGNAL:
            job = stop_asked(job, clock.utc_now(), word)
        job = self._kept(self._read(job, number, orders_count=False), number, record)
        # What was decided about it no longer holds: another one followed, if only because somebody asked for it.
        return replace(job, cancel_asked_at=None, reason=None, cause=None, hint=None, ended_at=None)

    def _last_attempt(self, job: Job, number: int) -> Job:
        job = self._read(_begun(job, number), number, orders_count=True)
        return self._kept(job, number, self._exit(number))

    def _read(self, job: Job, number: int, orders_count: bool) -> Job:
        while True:
            assert job.attempt is not None
            try:
                seen, _ = observe(self._directory, job.attempt, None)
            except NeverBegan:
                return job if orders_count else finish(job, End(None), clock.utc_now())
            if not orders_count:
                seen = replace(seen, stop_ordered=False, pause_ordered=False, policy_stop=None)
            job, events = advance(job, seen, NO_HURRY_S)
            self._store(number, events)
            self.events += len(events)
            if not seen.more:
                return job

    def _kept(self, job: Job, number: int, record: dict[str, Any] | None) -> Job:
        """Put the attempt down as it is, with the times its own files give."""
        assert job.attempt is not None
        attempt = job.attempt
        began, ended = _time_in(self._process(number), "started_at"), _time_in(record, "ended_at")
        if attempt.started_at is not None:
            attempt = replace(attempt, started_at=began or attempt.started_at)
        if attempt.ended_at is not None:
            attempt = replace(attempt, ended_at=ended or attempt.ended_at)
        if attempt.state in LIVE_ATTEMPT and self._recorded.state in FINAL_JOB:
            state = AttemptState.STOPPED if self._recorded.cancel_asked_at is not None else AttemptState.LOST
            attempt = replace(attempt, state=state, ended_at=self._recorded.ended_at)
        self.attempts.append((attempt, began or self._recorded.created_at, record))
        return replace(job, attempt=attempt, started_at=self._recorded.started_at or attempt.started_at)

    def _exit(self, number: int) -> dict[str, Any] | None:
        return _object_in(self._directory.attempt(number).exit)

    def _process(self, number: int) -> dict[str, Any] | None:
        return _object_in(self._directory.attempt(number).process)


def _begun(job: Job, number: int) -> Job:
    job = replace(job, attempt=Attempt(number, AttemptState.STARTING, retries=job.retries), waiting=None)
    return replace(job, state=job.derived_state)


def _object_in(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None where there is none, or damage."""
    try:
        found = read_json(path)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _time_in(record: dict[str, Any] | None, name: str) -> datetime | None:
    try:
        return datetime.fromisoformat((record or {})[name]).astimezone(UTC)
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
