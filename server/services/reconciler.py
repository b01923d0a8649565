"""The loop: the only one who starts and signals processes, and who moves jobs.

    bell or tick -> load (unfinished jobs, only after an intent or an end) -> for each live attempt whose files have
                    changed, that starts or stops, and every other second for each:
                        act: order a stop, look at directory and processes    (no database)
                        apply: rows, events and offset in one transaction     (guarded by the state they were loaded in)
                 -> for each queued or paused job: start, finish, hold or wait

It may be killed anywhere. What it did is in the files; what it did not store is seen again at the next look.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from eagle3_core.contract.events import Event
from eagle3_core.contract.exits import Reason
from eagle3_core.contract.jobdir import EVENTS_NAME, JOB_ID_VARIABLE, JobDir, is_full
from eagle3_core.contract.params import STAGES
from server.db.queries import events as event_queries
from server.db.queries import jobs as job_queries
from server.domain.advance import STALLED, Observation, advance, conclude, finish, read_events, stop_asked
from server.domain.changes import without_digits
from server.domain.job import CANCEL, PAUSE, Job
from server.domain.outcome import End, ExitRecord
from server.domain.queue import Finish, Hold, Host, Start, Wait, decide, ready
from server.domain.resources import GpuRef, environment_of
from server.domain.stall import StallLimits
from server.domain.states import FINAL_JOB, LIVE_JOB, WAITING_JOB, AttemptState, JobState
from server.errors import Unavailable
from server.services import audit
from server.services.backoff import Backoff
from server.services.leases import Leases, write_resources
from server.services.observer import NeverBegan, new_lines, observe
from server.services.orders import Orders, clear_orders, order_once
from server.services.paths import PathRules
from server.services.programs import foreign_program
from server.services.records import Gone, write_record, write_spec
from server.services.runtime import Runtime
from server.settings import worker_environment
from server.system import clock, locks, process
from server.system.process import Child, ProcessRecord
from server.system.watch import Watch

logger = logging.getLogger(__name__)

LOOK_S = 2.0
"""Seconds between looks at a running job whose files have not changed: at its processes, its pace, its limits."""
BLIND_LOOK_S = 0.2
QUEUE_S = 1.0
"""Seconds between looks at what the queued jobs wait for."""
MOVING_S = 0.03
AGAIN_S = 1.0
"""Between two tries to start an attempt that found the disk full."""

TOGETHER_S = 0.01
"""Seconds for each running job within which their events are read together: a burst takes a third of the CPU."""
TOGETHER_AT_MOST_S = 0.2
WAITED_FOR_S = 0.02
"""The same while somebody waits for news."""
RECORDS_LOOKED_AT = 100
REWORDED_S = 5.0

_MOVING = frozenset({JobState.STARTING, JobState.STOPPING})

assert JOB_ID_VARIABLE.startswith("EYAS_")  # or worker_environment would hand an outer job's mark on


class Reconciler:
    """One thread that brings stored state and real processes together, again and again."""

    def __init__(self, runtime: Runtime, on_death: Callable[[], None]) -> None:
        self._runtime = runtime
        self._on_death = on_death
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="reconciler")
        self._jobs: dict[str, Job] = {}
        self._children: dict[str, Child] = {}
        self._leaving: list[Child] = []
        self._tried: dict[str, float] = {}
        self._terminated: dict[str, float] = {}
        self._orders = Orders(runtime.settings)
        self._leases = Leases(runtime)
        settings = runtime.settings
        self._stall = StallLimits(settings.stall_factor, settings.stall_after_s, settings.stall_silent_after_s)
        self._backoff = Backoff()
        self._unrecorded: set[str] = set()
        self._trouble: str | None = None
        self._troubles: dict[str, str] = {}
        self._reworded: dict[str, float] = {}
        self._reload = True
        self._again = False
        self._watch = Watch(runtime.stir, EVENTS_NAME)
        self._watched: dict[str, int] = {}
        self._unseen: set[str] = set()
        self._unread: set[str] = set()
        self._looked = 0.0
        self._decided = 0.0

    def start(self) -> None:
        """Begin; adoption of what runs already is simply the first round."""
        with self._runtime.database.read() as session:
            unfinished = job_queries.unfinished_jobs(session)
        self._leases.adopt(unfinished)
        with self._runtime.database.read() as session:  # a daemon may have died between row and record
            self._unrecorded.update(job_queries.newest_ended(session, RECORDS_LOOKED_AT))
            for job in job_queries.unfinished_jobs(session):
                self._runtime.snapshots.put(job)  # answered from until the loop has recorded what became of it
                if job.state in WAITING_JOB and self._runtime.job_dir(job.id).cancel.exists():
                    self._cancelled_by_file(job.id)
        self._thread.start()

    def _cancelled_by_file(self, job_id: str) -> None:
        """A cancel that was written by hand while the daemon was away, of a job that had no process then."""
        self._runtime.unstored_cancels.setdefault(job_id, (self._runtime.settings.grace_s, True))
        audit.note_local_cancel(self._runtime, job_id)

    def _store_cancels(self) -> None:
        """Cancels that only a file holds so far."""
        for job_id, (grace_s, checkpoint) in list(self._runtime.unstored_cancels.items()):
            with self._runtime.database.write() as session:
                job_queries.ask_cancel(session, job_id, grace_s, clock.utc_now(), checkpoint)
            self._runtime.unstored_cancels.pop(job_id, None)
            self._reload = True

    def stop(self) -> None:
        """End soon; running jobs go on without us."""
        self._stopping.set()
        self._runtime.wake()
        self._thread.join()
        self._watch.close()

    @property
    def alive(self) -> bool:
        """Whether the loop turns."""
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                began = clock.boottime()
                self._runtime.bell.clear()
                self._runtime.urgent.clear()
                if self._runtime.intent.is_set():
                    self._runtime.intent.clear()
                    self._reload = True
                self._one_round()
                if not self._again:
                    self._runtime.bell.wait(self._pause())
                    self._runtime.urgent.wait(max(0.0, began + self._together_s - clock.boottime()))
        finally:
            if not self._stopping.is_set():
                self._on_death()

    def _one_round(self) -> None:
        """A round; while the database cannot be used it is tried again, and said once."""
        try:
            self.round()
            self._trouble = None
        except Unavailable as error:
            if error.detail != self._trouble:
                logger.error("%s; trying again", error.detail)
            self._trouble = error.detail
            self._reload, self._again = True, False

    def _pause(self) -> float:
        if any(job.state in _MOVING for job in self._jobs.values()):
            return MOVING_S
        return max(0.0, min(self._look_due, self._decision_due) - clock.boottime())

    @property
    def _together_s(self) -> float:
        if self._runtime.waiters.any:
            return WAITED_FOR_S
        return min(TOGETHER_AT_MOST_S, TOGETHER_S * sum(job.state in LIVE_JOB for job in self._jobs.values()))

    @property
    def _look_due(self) -> float:
        return self._looked + (BLIND_LOOK_S if self._watch.blind else LOOK_S)

    @property
    def _decision_due(self) -> float:
        queued = any(job.state == JobState.QUEUED for job in self._jobs.values())
        return self._decided + QUEUE_S if queued else self._look_due

    def round(self) -> None:
        """One turn over the unfinished jobs."""
        self._again = False
        self._leaving = [child for child in self._leaving if child.exit_code() is None]
        self._record_ends()
        self._store_cancels()
        new = self._reload
        if self._reload:
            self._load()
        changed, grown = self._watch.changed()
        self._unseen |= changed
        self._unread |= grown
        everything = clock.boottime() >= self._look_due
        if everything:
            self._looked = clock.boottime()
        for job in [job for job in self._jobs.values() if job.state in LIVE_JOB]:
            if everything or job.state in _MOVING or job.id in self._unseen or job.id not in self._watched:
                self._guarded(job, self._attend)
            elif job.id in self._unread:
                self._guarded(job, self._read_on)
        if self._reload:  # an end may have freed a slot or what depends on it
            new = True
            self._load()
        if new or everything or clock.boottime() >= self._decision_due:
            self._decide()

    def _decide(self) -> None:
        """Start, finish, hold or leave waiting what has no process."""
        self._decided = clock.boottime()
        jobs = list(self._jobs.values())
        if self._leases.release(self._jobs):
            self._runtime.hardware.look_now()
        not_due = self._backoff.not_due(jobs) | self._leases.ending(self._jobs)
        not_due |= self._runtime.space.waiting([job for job in ready(jobs) if job.id not in not_due], jobs)
        for decision in decide(jobs, self._host(jobs), not_due):
            match decision:
                case Start(job, gpus):
                    self._guarded(job, partial(self._launch, gpus=gpus))
                case Finish(job, why):
                    ended = conclude(replace(job, state=job.derived_state), why, clock.utc_now())
                    self._guarded(job, partial(self._apply, new=ended))
                case Hold(job):
                    self._wait(job, JobState.PAUSED, None)
                case Wait(job, waiting):
                    self._wait(job, JobState.QUEUED, waiting)

    def _host(self, jobs: Sequence[Job]) -> Host:
        """What the queue may give out."""
        hardware = self._runtime.hardware
        live = [job for job in jobs if job.state in LIVE_JOB]
        hardware.follow(live, any(job.state == JobState.QUEUED for job in jobs))
        return Host(
            self._runtime.settings.max_running,
            hardware.cpus,
            hardware.ram_bytes,
            hardware.gpus(self._leases.holders),
            hardware.not_fresh(),
            self._leases.holders,
        )

    def _wait(self, job: Job, state: JobState, waiting: str | None) -> None:
        new = replace(job, state=state, waiting=waiting)
        if new == job:
            return
        # Sizes and seconds in a reason change all the time, and each change of it is a write.
        same = new.state == job.state and without_digits(waiting) == without_digits(job.waiting)
        if same and clock.boottime() < self._reworded.get(job.id, 0.0):
            return
        self._reworded[job.id] = clock.boottime() + REWORDED_S
        self._guarded(job, partial(self._apply, new=new))

    def _load(self) -> None:
        with self._runtime.database.read() as session:
            self._jobs = {job.id: job for job in job_queries.unfinished_jobs(session)}
        self._leases.load()
        self._reworded = {job_id: at for job_id, at in self._reworded.items() if job_id in self._jobs}
        self._reload = False

    def _guarded(self, job: Job, step: Callable[[Job], None]) -> None:
        """Do one step for one job; trouble with it must not stop the others."""
        try:
            step(job)
            self._troubles.pop(job.id, None)
        except job_queries.Stale:
            self._reload = self._again = True
        except Unavailable:
            raise
        except Exception as error:  # around one job in the loop: the others go on
            text = f"{type(error).__name__}: {error}"
            if self._troubles.get(job.id) != text:
                logger.exception("job %s (%s) cannot be attended to", job.id, job.state)
            self._troubles[job.id] = text

    def _attend(self, job: Job) -> None:
        """Look at a live job, act on its intents, store what is new."""
        assert job.attempt is not None
        directory = self._runtime.job_dir(job.id)
        self._watch_over(job, directory)
        self._orders.write(job, directory, self._stop_by_policy(job))
        try:
            seen, record = observe(directory, job.attempt, self._children.get(job.id))
        except NeverBegan:
            self._begin_again(job)
            return
        if record is not None and seen.end is None and not seen.supervised:
            self._stop_unsupervised(job, record)
        if seen.end is not None and seen.end.exit is None:
            # Nobody else is left to clear up; before the end is stored, after which nobody would look again.
            process.kill_marked(job.id)
        new, events = advance(job, seen, self._runtime.settings.quiet_after_s, self._stall)
        self._again |= seen.more
        if not seen.more:
            self._unseen.discard(job.id)
            self._unread.discard(job.id)
        if new.health == STALLED and job.health != STALLED:
            logger.warning("job %s (%s) has stalled in the phase %s", job.id, job.name, new.status.phase)
            with contextlib.suppress(OSError):  # a full disk must not keep the job from being stored as stalled
                order_once(directory.stack, f"stalled-{seen.boottime_s:.0f}")
        if new != job:
            self._apply(job, new, events, seen)

    def _read_on(self, job: Job) -> None:
        """Store the events that a running job has written; the rest of it is looked at in its turn."""
        assert job.attempt is not None
        file = self._runtime.job_dir(job.id).attempt(job.attempt.number).events
        lines, more = new_lines(file, job.attempt.event_offset)
        new, events = read_events(job, lines, clock.utc_now())
        self._again |= more
        if not more:
            self._unread.discard(job.id)
        if new != job:
            self._apply(job, new, events)

    def _watch_over(self, job: Job, directory: JobDir) -> None:
        assert job.attempt is not None
        if self._watched.get(job.id) != job.attempt.number:
            path = directory.attempt(job.attempt.number).path
            if path.is_dir():
                self._watch.add(job.id, path)
                self._watched[job.id] = job.attempt.number

    def _begin_again(self, job: Job) -> None:
        """A daemon died between storing the attempt and starting it, or the disk was full."""
        assert job.attempt is not None
        wanted = job.cancel_asked_at is None and job.pause_asked_at is None
        if job.attempt.state == AttemptState.STARTING and wanted:
            if clock.boottime() - self._tried.get(job.id, 0.0) >= AGAIN_S:
                self._spawn(job)
        else:
            now = clock.utc_now()
            stop_for = PAUSE if job.cancel_asked_at is None and job.pause_asked_at is not None else CANCEL
            self._apply(job, finish(stop_asked(job, now, stop_for), End(None), now))

    def _stop_by_policy(self, job: Job) -> str | None:
        """The reason for which a living attempt is to be ended now, or None."""
        limit, since = job.policy.max_seconds, job.status.attempt_boottime_s
        if job.attempt is None or job.attempt.started_at is None or since is None:
            return None
        if limit is not None and clock.boottime() - since >= limit:
            return str(Reason.TIME_LIMIT)
        # Its stacks were ordered when it was found; the shim takes them before it heeds a stop.
        return STALLED if job.policy.on_stall == "stop" and job.health == STALLED else None

    def _launch(self, job: Job, gpus: Sequence[GpuRef]) -> None:
        if self._runtime.job_dir(job.id).cancel.exists():  # written by hand
            self._cancelled_by_file(job.id)
            self._again = True
            return
        if (short := self._runtime.space.short(job, self._jobs.values())) is not None:
            self._wait(job, JobState.QUEUED, short)
            return
        with self._runtime.database.write() as session:
            started = job_queries.begin_attempt(session, job, clock.utc_now(), gpus)
        self._leases.load()
        self._keep(started)
        self._spawn(started)

    def _spawn(self, job: Job) -> None:
        """Directory, then lock, then process. A crash anywhere leaves it started once or not at all."""
        assert job.attempt is not None
        self._tried[job.id] = clock.boottime()
        directory = self._runtime.job_dir(job.id)
        attempt = directory.attempt(job.attempt.number)
        settings, params = self._runtime.settings, STAGES[job.stage].model_validate(job.params)
        if refused := PathRules(settings).left_roots(params) or foreign_program(settings, params):
            self._apply(job, finish(job, End(ExitRecord(error=refused)), clock.utc_now()))
            return
        try:
            write_spec(self._runtime, write_record(self._runtime, job.id))
            attempt.path.mkdir(parents=True, exist_ok=True)
            write_resources(attempt, job.attempt.gpus)
            lock = locks.take(attempt.lock)
            if lock is None:
                return  # it lives after all; the next look adopts it
            try:
                if job.attempt.number > 1:  # nothing of the new attempt lives yet
                    process.kill_marked(job.id)
                clear_orders(directory)
                self._children[job.id] = process.spawn(
                    self._runtime.settings.worker_python,
                    attempt.path,
                    attempt.log,
                    lock,
                    worker_environment(job.id, lock, job.policy.max_seconds, self._given(job)),
                )
            finally:
                locks.release(lock)
        except OSError as error:
            if is_full(error):
                logger.warning("job %s cannot be started yet: %s", job.id, error)
                return
            failed = End(ExitRecord(error=f"{type(error).__name__}: {error}"))
            self._apply(job, finish(job, failed, clock.utc_now()))

    def _given(self, job: Job) -> dict[str, str]:
        assert job.attempt is not None
        return environment_of(job.resources, job.attempt.gpus, hide=self._runtime.hardware.hides_gpus)

    def _stop_unsupervised(self, job: Job, record: ProcessRecord) -> None:
        """Do the dead shim's duty: end the stage that was asked to stop."""
        assert job.attempt is not None
        if job.attempt.stop_asked_at is None:
            return
        since = self._terminated.get(job.id)
        if since is None:
            self._terminated[job.id] = clock.boottime()
            process.terminate(record.stage, job.id)
        elif clock.boottime() - since >= self._orders.grace(job):
            process.kill_marked(job.id)

    def _apply(
        self,
        old: Job,
        new: Job,
        events: Sequence[tuple[Event, str]] = (),
        seen: Observation | None = None,
    ) -> None:
        """Store what has changed, events and offset in one transaction, and show it."""
        exit_record: dict[str, Any] | None = None
        if seen is not None and seen.end is not None and seen.end.exit is not None:
            exit_record = seen.end.exit.model_dump()
        with self._runtime.database.write() as session:
            stored = job_queries.save(session, old, new, exit_record)
            if new.attempt is not None:
                event_queries.record(session, new.id, new.attempt.number, events)
        if new.cancel_asked_at is not None and old.cancel_asked_at is None:
            audit.note_local_cancel(self._runtime, new.id)
        try:
            if old.state in LIVE_JOB and stored.state not in LIVE_JOB:
                self._attempt_over(stored)
            if stored.state in FINAL_JOB:
                self._ended(stored)
        finally:
            self._keep(stored)  # shown last: whoever sees the end finds it in record.json too

    def _record_ends(self) -> None:
        """Write the records of ended jobs; on a full disk, as soon as there is room."""
        for job_id in list(self._unrecorded):
            try:
                write_record(self._runtime, job_id)
            except Gone:
                logger.info("job %s was deleted", job_id)
            except OSError as error:
                text = f"record.json of job {job_id} cannot be written: {error}"
                if self._troubles.get(job_id) != text:
                    logger.error("%s; trying again", text)
                self._troubles[job_id] = text
                continue
            self._troubles.pop(job_id, None)
            self._unrecorded.discard(job_id)

    def _keep(self, job: Job) -> None:
        self._runtime.snapshots.put(job)
        if job.state in FINAL_JOB:
            self._jobs.pop(job.id, None)
        else:
            self._jobs[job.id] = job

    def _attempt_over(self, job: Job) -> None:
        self._reload = self._again = True
        self._watch.remove(job.id)
        self._watched.pop(job.id, None)
        self._unseen.discard(job.id)
        self._unread.discard(job.id)
        self._terminated.pop(job.id, None)
        self._orders.forget(job.id)
        self._backoff.begin(job)
        self._tried.pop(job.id, None)
        child = self._children.pop(job.id, None)
        if child is not None and child.exit_code() is None:
            self._leaving.append(child)

    def _ended(self, job: Job) -> None:
        self._reload = self._again = True
        self._backoff.forget(job.id)
        self._runtime.space.forget(job.id)
        self._unrecorded.add(job.id)
        self._record_ends()
        logger.info("job %s (%s): %s", job.id, job.name, job.state + (f": {job.reason}" if job.reason else ""))
