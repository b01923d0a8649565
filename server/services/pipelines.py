"""Pipelines: a whole chain as one document, from its references to stored jobs, and its state as that of its jobs.

A pipeline is what its jobs say of it: each keeps its id and name, in its row and in record.json.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from pydantic import BaseModel, Field

from eagle3_core.contract.params import STAGES
from server.db.queries import listing
from server.domain.ids import is_job_id, new_job_id
from server.domain.job import Job, PipelineRef
from server.domain.listing import cursor_before
from server.domain.policy import RetryPolicy
from server.domain.references import BadReference, escape, filled_in, references_in
from server.domain.resources import BY_STAGE
from server.domain.states import FINAL_JOB, LIVE_JOB, JobState
from server.domain.view import JobRow, row_of, summary_of
from server.domain.words import nearest
from server.errors import FieldError, Invalid, NotFound
from server.services.drafts import Placed, draft_all
from server.services.jobs import ask_cancel, read_cursor
from server.services.requests import JobRequest, PipelineRequest, PipelineStage
from server.services.runtime import Runtime
from server.services.submission import store_once


class PipelineRow(BaseModel):
    """A pipeline in the list."""

    id: str
    name: str
    state: JobState = Field(description="follows from its jobs")
    jobs_total: int
    jobs_done: int = Field(description="that have ended")
    summary: str
    created_at: datetime
    started_at: datetime | None
    ended_at: datetime | None = Field(description="when the last job ended; null while one has not")


class PipelineView(PipelineRow):
    """Everything about one pipeline."""

    jobs: list[JobRow] = Field(description="in the order of the document")


class PipelineList(BaseModel):
    """Newest first."""

    pipelines: list[PipelineRow]
    next_cursor: str | None = Field(description="send it as `cursor` for older ones; null at the end")


def submit_pipeline(runtime: Runtime, request: PipelineRequest, key: str | None) -> tuple[PipelineView, bool]:
    """Store the jobs of a document, once for each key; False when they had been stored before.

    Raises:
        Invalid: with a pointer to each faulty field.
        ServiceError: as `submission.submit`.
    """
    reference = PipelineRef(new_job_id(), request.name)
    jobs, created = store_once(runtime, request, key, lambda: draft_all(runtime, place(runtime, request)), reference)
    return _view(jobs), created


def place(runtime: Runtime, request: PipelineRequest) -> list[Placed]:
    """The jobs of a document, its defaults and references filled in.

    Raises:
        Invalid: with a pointer to each reference, default or name that means nothing.
    """
    return _Expansion(runtime, request).placed()


def show_pipeline(runtime: Runtime, pipeline_id: str) -> PipelineView:
    """A pipeline.

    Raises:
        NotFound: there is none of that id.
    """
    return _view(_jobs_of(runtime, pipeline_id))


def list_pipelines(runtime: Runtime, limit: int, cursor: str | None) -> PipelineList:
    """A page of pipelines, newest first.

    Raises:
        Invalid: the cursor is none.
    """
    before = None if cursor is None else read_cursor(cursor)
    with runtime.database.read() as session:
        found = listing.pipelines(session, limit + 1, before)
        rows = [_row(listing.jobs_of_pipeline(session, reference.id)) for _, reference in found[:limit]]
    return PipelineList(pipelines=rows, next_cursor=cursor_before(found[limit - 1][0]) if len(found) > limit else None)


def cancel_pipeline(runtime: Runtime, pipeline_id: str, grace_s: float | None, checkpoint: bool) -> PipelineView:
    """Have every job stopped that has not ended, the last one first, so that none is started meanwhile.

    Raises:
        NotFound: there is none of that id.
    """
    for job in reversed(_jobs_of(runtime, pipeline_id)):
        if job.state not in FINAL_JOB:
            ask_cancel(runtime, job.id, grace_s, checkpoint)
    return show_pipeline(runtime, pipeline_id)


def _jobs_of(runtime: Runtime, pipeline_id: str) -> list[Job]:
    if is_job_id(pipeline_id):
        with runtime.database.read() as session:
            jobs = listing.jobs_of_pipeline(session, pipeline_id)
        if jobs:
            return jobs
    raise NotFound(f"there is no pipeline {pipeline_id!r}")


def pipeline_state(states: Sequence[JobState]) -> JobState:
    """The state that follows from those of its jobs, of which there is at least one.

    Something that runs decides; else something that waits; of ended ones, a failure before a cancel.
    """
    live = [state for state in states if state in LIVE_JOB]
    if live:
        return JobState.RUNNING if JobState.RUNNING in live else live[0]
    for state in (JobState.QUEUED, JobState.PAUSED, JobState.FAILED, JobState.CANCELLED):
        if state in states:
            return state
    return JobState.SUCCEEDED


def _summary(state: JobState, jobs: Sequence[Job]) -> str:
    """One line: how far it is, and the job that matters now."""
    done = sum(job.state in FINAL_JOB for job in jobs)
    text = f"{state}; {done} of {len(jobs)} jobs have ended"
    telling = next((job for job in jobs if job.state in LIVE_JOB), None) or next(
        (job for job in jobs if job.state == state and state != JobState.SUCCEEDED), None
    )
    return text if telling is None else f"{text}; {telling.name}: {summary_of(telling)}"


def _common(jobs: Sequence[Job]) -> dict[str, Any]:
    reference = jobs[0].pipeline
    assert reference is not None
    state = pipeline_state([job.state for job in jobs])
    started = [job.started_at for job in jobs if job.started_at is not None]
    ended = [job.ended_at for job in jobs if job.ended_at is not None]
    return {
        "id": reference.id,
        "name": reference.name,
        "state": state,
        "jobs_total": len(jobs),
        "jobs_done": sum(job.state in FINAL_JOB for job in jobs),
        "summary": _summary(state, jobs),
        "created_at": jobs[0].created_at,
        "started_at": min(started, default=None),
        "ended_at": max(ended) if state in FINAL_JOB else None,
    }


def _row(jobs: Sequence[Job]) -> PipelineRow:
    return PipelineRow(**_common(jobs))


def _view(jobs: Sequence[Job]) -> PipelineView:
    return PipelineView(**_common(jobs), jobs=[row_of(job) for job in jobs])


@dataclass
class _Expansion:
    """One document on its way to a list of jobs."""

    runtime: Runtime
    request: PipelineRequest
    ids: dict[str, str] = field(init=False)
    params: dict[str, dict[str, Any]] = field(init=False)
    errors: list[FieldError] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ids = {name: new_job_id() for name in self.request.stages}
        self.params = {name: self._with_defaults(name, stage) for name, stage in self.request.stages.items()}

    def placed(self) -> list[Placed]:
        self._refuse_unknown_defaults()
        needs = {name: self._named(name) for name in self.request.stages}
        if self.errors:
            raise Invalid.of(self.errors)
        outputs = {name: self._output_dir(name, ()) for name in self.request.stages}
        if self.errors:
            raise Invalid.of(self.errors)

        def look_up(stage: str, what: str) -> str:
            return self.ids[stage] if what == "id" else outputs[stage]

        return [
            Placed(
                f"/stages/{name}",
                self._job(name, stage, filled_in(self.params[name], look_up), needs[name]),
                self.ids[name],
            )
            for name, stage in self.request.stages.items()
        ]

    def _kind(self, name: str) -> str:
        return self.request.stages[name].stage or name

    def _with_defaults(self, name: str, stage: PipelineStage) -> dict[str, Any]:
        known = STAGES.get(self._kind(name))
        fields = () if known is None else known.model_fields
        common = {key: value for key, value in self.request.defaults.params.items() if key in fields}
        return {**common, **stage.params}

    def _refuse_unknown_defaults(self) -> None:
        """A default that no stage knows is a misspelt one."""
        kinds = [STAGES[self._kind(name)] for name in self.request.stages if self._kind(name) in STAGES]
        known = {key for kind in kinds for key in kind.model_fields}
        for key in self.request.defaults.params:
            if key not in known:
                near = nearest(key, known)
                text = f"{key} is a parameter of no stage here" + (f"; did you mean {near}?" if near else "")
                self.errors.append(FieldError(f"/defaults/params/{escape(key)}", text, near))

    def _named(self, name: str) -> list[str]:
        """The stages that one refers to."""
        pointer = f"/stages/{name}/params"
        try:
            found = references_in(self.params[name])
        except BadReference as error:
            self.errors.append(FieldError(pointer + error.pointer, error.message))
            return []
        for place, other in found:
            if other not in self.ids:
                near = nearest(other, self.ids)
                text = f"there is no stage {other!r} in this pipeline" + (f"; did you mean {near}?" if near else "")
                self.errors.append(FieldError(pointer + place, text, near))
            elif other == name:
                self.errors.append(FieldError(pointer + place, f"{name} refers to itself"))
        return list(dict.fromkeys(other for _, other in found))

    def _output_dir(self, name: str, above: tuple[str, ...]) -> str:
        """Where a stage will write; its own `output_dir` may refer to another one's."""
        if name in above:
            text = f"these output directories refer to one another in a circle: {', '.join(above)}"
            self.errors.append(FieldError(f"/stages/{name}/params/output_dir", text))
            return ""
        said = self.params[name].get("output_dir")
        if not isinstance(said, str):
            return str(self.runtime.job_dir(self.ids[name]).artifacts)

        def look_up(stage: str, what: str) -> str:
            return self.ids[stage] if what == "id" else self._output_dir(stage, (*above, name))

        return str(filled_in(said, look_up))

    def _job(self, name: str, stage: PipelineStage, params: Mapping[str, Any], needs: Sequence[str]) -> JobRequest:
        defaults = self.request.defaults
        return JobRequest(
            name=name,
            stage=self._kind(name),
            params=dict(params),
            depends_on=list(dict.fromkeys([*stage.depends_on, *needs])),
            labels={**self.request.labels, **stage.labels},
            retry=stage.retry or defaults.retry or RetryPolicy(),
            max_seconds=stage.max_seconds or defaults.max_seconds,
            priority=defaults.priority if stage.priority is None else stage.priority,
            resources=stage.resources or defaults.resources or BY_STAGE,
            on_stall=stage.on_stall or defaults.on_stall,
        )
