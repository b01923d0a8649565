"""One job, its processes and a daemon that may die at any moment, driven at random against the pure domain.

world                               daemon
shim and stage: absent -> begun     stored job (the database), seen job (memory, lost with the daemon)
  -> stage gone -> shim gone        look: observe -> advance -> store    launch: decide -> attempt -> spawn
files: events, exit.json,           order: a cancel becomes a file
  cancel.json
"""

import json
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from eagle3_core.contract.exits import ExitCode, Reason
from server.domain.advance import Observation, advance, conclude, finish, stop_asked
from server.domain.job import Attempt, Dependency, Job
from server.domain.outcome import End, ExitRecord
from server.domain.queue import Finish, Host, Start, decide
from server.domain.states import FINAL_JOB, LIVE_ATTEMPT, AttemptState, JobState, job_state
from server.domain.view import summary_of, view_of

NOW = datetime(2026, 1, 1, tzinfo=UTC)
QUEUED = Job(number=1, id="j", name="j", stage="train", params={}, output_dir="/o", created_at=NOW)


@dataclass
class World:
    """What really is: processes and files of the one attempt that may ever be spawned."""

    lines: list[bytes] = field(default_factory=list)
    begun: bool = False
    shim: bool = False
    stage: bool = False
    result: bool = False
    cancel_file: bool = False
    ordered_in_time: bool = False
    exit: ExitRecord | None = None
    status: tuple[int | None, str | None] | None = None
    spawned: int = 0

    @property
    def lock_held(self) -> bool:
        return self.shim or self.stage

    def write(self, kind: str, **fields: object) -> None:
        event = {"seq": len(self.lines) + 1, "time": "2026-01-01T00:00:00Z", "boottime_s": 1.0, "type": kind, **fields}
        self.lines.append(json.dumps(event).encode())


class JobMachine(RuleBasedStateMachine):
    """See the module's word."""

    @initialize(waits=st.booleans())
    def submit(self, waits: bool) -> None:
        needs = (Dependency("d", "dep", JobState.RUNNING, None),) if waits else ()
        self.world = World()
        self.stored = replace(QUEUED, depends_on=needs)
        self.final: Job | None = None
        self.attempts: list[AttemptState] = []

    # The user and what the job depends on.

    @rule(really=st.integers(0, 4))
    def user_cancels(self, really: int) -> None:
        """Seldom, so that jobs come far enough to end in other ways."""
        if really == 4:
            self.cancel()

    def cancel(self) -> None:
        if self.stored.state not in FINAL_JOB and self.stored.cancel_asked_at is None:
            self.stored = replace(self.stored, cancel_asked_at=NOW)

    @precondition(lambda self: self.stored.depends_on and self.stored.depends_on[0].state == JobState.RUNNING)
    @rule(end=st.sampled_from(sorted(FINAL_JOB)))
    def dependency_ends(self, end: JobState) -> None:
        self.stored = replace(self.stored, depends_on=(replace(self.stored.depends_on[0], state=end),))

    @rule(really=st.integers(0, 4))
    def cancel_by_file(self, really: int) -> None:
        """`control/cancel.json` written by hand while the daemon is away."""
        self.world.cancel_file |= really == 4

    # Processes.

    @precondition(lambda self: self.world.stage)
    @rule(more=st.integers(0, 3))
    def stage_reports(self, more: int) -> None:
        self.world.write("phase", phase="working")
        for _ in range(more):
            self.world.write("progress", step=1, steps=2)

    @precondition(lambda self: self.world.shim and not self.world.stage and self.world.status is None)
    @rule()
    def shim_starts_the_stage(self) -> None:
        self.world.stage = True

    @precondition(lambda self: self.world.stage)
    @rule(how=st.sampled_from(["done", "stopped", "failed", "killed", "lied", "killed after its result"]))
    def stage_ends(self, how: str) -> None:
        if how in ("done", "killed after its result"):
            self.world.result = True
            self.world.write("result", data={}, artifacts={})
        if how == "failed":
            self.world.write("error", exit_code=3, cause="row 7", hint=None)
        codes = {"done": 0, "stopped": int(ExitCode.STOPPED), "failed": 3, "lied": 0}
        self.world.stage = False
        self.world.status = (codes[how], None) if how in codes else (None, "SIGKILL")

    @precondition(lambda self: self.world.shim and not self.world.stage)
    @rule()
    def shim_ends(self) -> None:
        """It writes exit.json, then lets go of the lock."""
        if self.world.status is None:
            self.world.exit = ExitRecord(error="cannot be started")
        else:
            self.world.exit = ExitRecord(code=self.world.status[0], signal=self.world.status[1])
        self.world.shim = False

    @precondition(lambda self: self.world.shim)
    @rule()
    def shim_is_killed(self) -> None:
        self.world.shim = False

    # The daemon. Each rule begins with what is stored, so that a death between any two of them is in every run.

    @rule()
    def loop_orders_the_stop(self) -> None:
        if self.stored.state in (JobState.STARTING, JobState.RUNNING) and self.stored.cancel_asked_at is not None:
            self.world.cancel_file = True

    @rule(spawn=st.booleans())
    def loop_decides(self, spawn: bool) -> None:
        """`spawn` false: the daemon dies once the attempt is stored."""
        for decision in decide([self.stored], Host(max_running=1)):
            if isinstance(decision, Start):
                assert self.stored.cancel_asked_at is None, "a cancelled job was started"
                self.stored = replace(
                    self.stored, state=JobState.STARTING, attempt=Attempt(len(self.attempts) + 1, AttemptState.STARTING)
                )
                self.attempts.append(AttemptState.STARTING)
                if spawn:
                    self._spawn()
            elif isinstance(decision, Finish):
                ended = replace(self.stored, state=job_state(self.stored.intents, []))
                self._store(conclude(ended, decision.why, NOW))

    @precondition(lambda self: self.stored.attempt is not None and self.stored.attempt.state in LIVE_ATTEMPT)
    @rule(lines=st.integers(1, 4), late_cancel=st.booleans())
    def loop_looks(self, lines: int, late_cancel: bool) -> None:
        """`late_cancel`: the user's request is stored after the job was loaded, so that the save finds a newer row."""
        loaded, world = self.stored, self.world
        if not world.begun and not world.lock_held and world.exit is None:
            if loaded.attempt.state == AttemptState.STARTING and loaded.cancel_asked_at is None:
                self._spawn()
            else:
                self._store(finish(stop_asked(loaded, NOW), End(None), NOW))
            return
        over = not world.lock_held or world.exit is not None
        unread = world.lines[loaded.status.last_seq :]
        new = []
        offset = loaded.attempt.event_offset
        for line in unread[:lines]:
            offset += len(line) + 1
            new.append((offset, line))
        seen = Observation(
            now=NOW,
            boottime_s=2.0,
            lines=new,
            more=len(unread) > len(new),
            started_boottime_s=1.0 if world.stage or world.status is not None else None,
            supervised=world.shim,
            stop_ordered=world.cancel_file,
            end=End(world.exit) if over else None,
        )
        moved, _ = advance(loaded, seen, quiet_after_s=60)
        if late_cancel and loaded.cancel_asked_at is None and moved.state in FINAL_JOB:
            self.cancel()  # the guarded save refuses what was made of the older row
            return
        if world.cancel_file and seen.end is None:
            world.ordered_in_time = True
        self._store(moved)

    def _spawn(self) -> None:
        """The shim takes over the lock and writes process.json."""
        self.world.spawned += 1
        self.world.begun = self.world.shim = True

    def _store(self, job: Job) -> None:
        if self.stored.cancel_asked_at is not None:
            assert job.cancel_asked_at is not None
        self.stored = job
        if job.attempt is not None:
            self.attempts[-1] = job.attempt.state
        if job.state in FINAL_JOB:
            self.final = job

    # What must always hold.

    @invariant()
    def a_final_state_is_never_left(self) -> None:
        if self.final is not None:
            assert self.stored.state == self.final.state
            assert self.stored.reason == self.final.reason
            assert decide([self.stored], Host(max_running=1)) == []

    @invariant()
    def it_is_started_at_most_once(self) -> None:
        assert self.world.spawned <= 1
        assert sum(state in LIVE_ATTEMPT for state in self.attempts) <= 1

    @invariant()
    def the_state_follows_from_intents_and_attempts(self) -> None:
        job = self.final or self.stored  # what becomes of a dependency later does not reach an ended job
        derived = job_state(job.intents, self.attempts)
        assert job.state == derived or (job.state == JobState.QUEUED and derived in FINAL_JOB)  # until the loop's turn

    @invariant()
    def a_running_job_is_never_called_ended_nor_an_ended_one_running(self) -> None:
        if self.final is not None:
            assert not self.world.lock_held or self.world.exit is not None
        if self.stored.state in (JobState.RUNNING, JobState.STARTING):
            assert self.stored.attempt is not None and self.stored.attempt.state in LIVE_ATTEMPT

    @invariant()
    def the_end_is_the_right_one(self) -> None:
        if self.final is None:
            return
        world, state = self.world, self.final.state
        if state == JobState.SUCCEEDED:
            assert world.result
            assert world.exit is None or world.exit.code == 0
        if state == JobState.CANCELLED:
            assert self.final.cancel_asked_at is not None
        if (
            world.ordered_in_time
        ):  # the order was seen while it lived: a cancel never loses against anything but success
            assert state in (JobState.CANCELLED, JobState.SUCCEEDED)
        if state == JobState.FAILED and not self.attempts:
            assert self.final.reason == Reason.DEPENDENCY_FAILED
        assert (self.final.reason is None) == (state == JobState.SUCCEEDED)

    @invariant()
    def whatever_it_is_can_be_shown(self) -> None:
        view_of(self.stored)
        assert summary_of(self.stored).startswith(str(self.stored.state))


JobMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestJobMachine = JobMachine.TestCase
