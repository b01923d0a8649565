"""From a request to stored jobs: all of a chain or nothing.

names -> stages and params -> dependencies (no cycle) -> paths -> content -> one transaction -> directories
"""

import difflib
import hashlib
import json
import shutil
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eagle3_core.contract.jobdir import is_full
from eagle3_core.contract.params import STAGES, StageParams
from server.db.queries import jobs as job_queries
from server.domain.ids import is_job_id, new_job_id
from server.domain.job import Job, NewJob
from server.domain.policy import Policy, RetryPolicy
from server.domain.resources import BY_STAGE, Resources
from server.errors import (
    MAX_ERRORS,
    Conflict,
    FieldError,
    Forbidden,
    InsufficientStorage,
    Invalid,
    KeyReused,
    ServiceError,
    Unavailable,
)
from server.services.adoption import complete
from server.services.paths import PathRules, path_error, resolve
from server.services.preflight import check_content
from server.services.programs import refuse_foreign_programs
from server.services.records import write_new
from server.services.remote_code import refuse_remote_code
from server.services.runtime import Runtime
from server.services.settling import settle
from server.services.space import Planned
from server.system import clock

NameText = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]+$")]


class JobRequest(BaseModel):
    """One job: a stage and its parameters."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    name: NameText | None = None
    stage: str = Field(description="prepare, extract, train, validate, evaluate, external or adopt")
    params: dict[str, Any] = Field(
        description="the parameters of the stage",
        json_schema_extra={"anyOf": [params.model_json_schema() for params in STAGES.values()]},
    )
    depends_on: list[NameText] = Field([], max_length=100, description="ids of jobs, or names of jobs of this chain")
    retry: RetryPolicy = Field(RetryPolicy(), description="which ends are followed by another attempt")
    max_seconds: float | None = Field(
        None, gt=0, le=31_536_000, description="seconds one attempt may take; over them it fails with time_limit"
    )
    priority: int = Field(0, ge=-1000, le=1000, description="the higher one starts first; the older one among equals")
    resources: Resources = Field(BY_STAGE, description="GPUs, CPUs and memory; default: what the stage needs")
    on_stall: Literal["report", "stop"] = Field(
        "report", description="stop: an attempt without progress for too long is ended, with the reason stalled"
    )


class ChainRequest(BaseModel):
    """Several jobs, stored together or not at all."""

    model_config = ConfigDict(extra="forbid")

    jobs: list[JobRequest] = Field(min_length=1, max_length=100)


@dataclass(frozen=True)
class _Draft:
    """A job of the request on its way to being stored."""

    id: str
    name: str
    pointer: str
    stage: str
    params: StageParams
    request: JobRequest
    output_dir: Path
    depends_on: tuple[str, ...] = ()
    resources: Resources = BY_STAGE


def submit(runtime: Runtime, request: JobRequest | ChainRequest, key: str | None = None) -> tuple[list[Job], bool]:
    """Store the jobs of a request, once for each key.

    Returns:
        The jobs, and False when they had been stored before.

    Raises:
        Invalid: with a pointer to each faulty field; or the key came before with another body.
        Forbidden: a path lies outside the roots, or a program is not allowed.
        InsufficientStorage: what the jobs would write does not fit.
    """
    if key is None:
        return _store(runtime, _drafts(runtime, request)), True
    keyed = _Keyed(key, _hash_of(request))
    if known := _known(runtime, keyed):
        return known, False
    try:
        return _store(runtime, _drafts(runtime, request), keyed), True
    except ServiceError:
        # The same request may have been stored meanwhile: what refuses this one is then its twin.
        if known := _known(runtime, keyed):
            return known, False
        raise


@dataclass(frozen=True)
class _Keyed:
    """An idempotency key and the hash of the body it came with."""

    key: str
    body_hash: str


def _hash_of(request: JobRequest | ChainRequest) -> str:
    """Of what was sent, whatever its spacing and order; fields of later versions do not change it."""
    sent = request.model_dump(mode="json", exclude_unset=True)
    return hashlib.sha256(json.dumps(sent, sort_keys=True).encode()).hexdigest()


def _known(runtime: Runtime, keyed: _Keyed) -> list[Job]:
    """The jobs stored with this key."""
    with runtime.database.read() as session:
        jobs = job_queries.jobs_of_key(session, keyed.key)
    if jobs and jobs[0].body_hash != keyed.body_hash:
        raise KeyReused(f"the Idempotency-Key {keyed.key!r} came with another body before; its job is {jobs[0].id}")
    return jobs


def _drafts(runtime: Runtime, request: JobRequest | ChainRequest) -> list[_Draft]:
    """The jobs of a request, checked."""
    chain = isinstance(request, ChainRequest)
    requests = request.jobs if isinstance(request, ChainRequest) else [request]
    drafts = [_draft(runtime, one, f"/jobs/{place}" if chain else "") for place, one in enumerate(requests)]
    named = [(f"{draft.pointer}/params", draft.params) for draft in drafts]
    refuse_foreign_programs(runtime.settings, named)
    refuse_remote_code(runtime.settings, named)
    _refuse(_duplicate_names(drafts))
    drafts = _with_dependencies(runtime, drafts)
    _check_paths(runtime, drafts)
    for draft in drafts:
        _refuse(list(check_content(draft.params, f"{draft.pointer}/params")))
    _check_space(runtime, drafts)
    return [replace(draft, resources=_resources(runtime, draft)) for draft in drafts]


def _resources(runtime: Runtime, draft: _Draft) -> Resources:
    return settle(runtime.hardware, draft.request.resources, draft.params, draft.pointer)


def _check_space(runtime: Runtime, drafts: Sequence[_Draft]) -> None:
    planned = [Planned(draft.pointer, draft.name, draft.params, draft.output_dir) for draft in drafts]
    with runtime.database.read() as session:
        unfinished = job_queries.unfinished_jobs(session)
    runtime.space.refuse_what_cannot_fit(planned, unfinished)


def nearest(word: str, known: Collection[str]) -> str | None:
    """The known word a misspelt one most resembles, or None."""
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return found[0] if found else None


def _refuse(errors: Sequence[FieldError]) -> None:
    if errors:
        raise Invalid.of(errors)


def _draft(runtime: Runtime, request: JobRequest, pointer: str) -> _Draft:
    params_class = STAGES.get(request.stage)
    if params_class is None:
        text = f"{request.stage!r} is not a stage; there are {', '.join(sorted(STAGES))}"
        raise Invalid.of([FieldError(f"{pointer}/stage", text, nearest(request.stage, STAGES))])
    try:
        params = params_class.model_validate(request.params)
    except ValidationError as error:
        shown = _field_errors(error, params_class, f"{pointer}/params")
        raise Invalid.of(shown, error.error_count()) from None
    job_id = new_job_id()
    params = complete(params, f"{pointer}/params")
    named = params.paths().get("output_dir")
    output_dir = runtime.job_dir(job_id).artifacts if named is None else resolve(named[1])
    return _Draft(job_id, request.name or request.stage, pointer, request.stage, params, request, output_dir)


def _field_errors(error: ValidationError, params_class: type[StageParams], pointer: str) -> list[FieldError]:
    found = []
    for fault in error.errors(include_url=False, include_context=False, include_input=False)[:MAX_ERRORS]:
        place = "/".join(str(part) for part in fault["loc"])
        where = f"{pointer}/{place}" if place else pointer
        if fault["type"] == "extra_forbidden":
            name = str(fault["loc"][-1])
            near = nearest(name, params_class.model_fields)
            text = f"{name} is not a field of {params_class.stage}" + (f"; did you mean {near}?" if near else "")
            found.append(FieldError(where, text, near))
        else:
            found.append(FieldError(where, fault["msg"].removeprefix("Value error, ")))
    return found


def _duplicate_names(drafts: Sequence[_Draft]) -> list[FieldError]:
    seen: dict[str, str] = {}
    errors = []
    for draft in drafts:
        if draft.name in seen:
            text = f"{draft.name!r} is also the name of {seen[draft.name]}; names in a chain must differ"
            errors.append(FieldError(f"{draft.pointer}/name", text))
        seen.setdefault(draft.name, draft.pointer)
    return errors


def _with_dependencies(runtime: Runtime, drafts: Sequence[_Draft]) -> list[_Draft]:
    """Names and ids of `depends_on` as ids."""
    own = {draft.name: draft.id for draft in drafts}
    errors: list[FieldError] = []
    resolved = []
    with runtime.database.read() as session:
        for draft in drafts:
            ids: list[str] = []
            for place, word in enumerate(draft.request.depends_on):
                pointer = f"{draft.pointer}/depends_on/{place}"
                if word in own:
                    ids.append(own[word])
                elif is_job_id(word) and job_queries.job_exists(session, word):
                    ids.append(word)
                elif len(named := job_queries.ids_named(session, word)) == 1:
                    ids.append(named[0])
                elif named:
                    errors.append(FieldError(pointer, f"{len(named)} jobs are called {word!r}; give the id of one"))
                else:
                    near = nearest(word, own)
                    errors.append(FieldError(pointer, f"there is no job {word!r}", near))
            resolved.append(replace(draft, depends_on=tuple(dict.fromkeys(ids))))
    _refuse(errors)
    _refuse(_cycle(resolved))
    return resolved


def _cycle(drafts: Sequence[_Draft]) -> list[FieldError]:
    """A fault for each job that waits, in the end, for itself."""
    left = {draft.id: draft for draft in drafts}
    while free := [draft for draft in left.values() if not any(needed in left for needed in draft.depends_on)]:
        for draft in free:
            del left[draft.id]
    names = ", ".join(draft.name for draft in left.values())
    text = f"these jobs wait for one another in a circle: {names}"
    return [FieldError(f"{draft.pointer}/depends_on", text) for draft in left.values()]


def _check_paths(runtime: Runtime, drafts: Sequence[_Draft]) -> None:
    rules = PathRules(runtime.settings)
    outside = [
        FieldError(f"{draft.pointer}/params/{field}", fault)
        for draft in drafts
        for field, fault in rules.refused(draft.params)
    ]
    if outside:
        raise Forbidden(f"{outside[0].pointer}: {outside[0].message}", outside)
    with runtime.database.read() as session:
        claimed = {Path(path): f"job {job}" for path, job in job_queries.live_output_dirs(session).items()}
        existing = {
            draft.id: job_queries.upstream_output_dirs(session, _outside_needs(draft, drafts)) for draft in drafts
        }
    errors: list[FieldError] = []
    for draft in drafts:
        coming = {Path(path) for path in existing[draft.id]} | _upstream(draft, drafts)
        for field, (role, path) in draft.params.paths().items():
            pointer = f"{draft.pointer}/params/{field}"
            if role == "input":
                errors += path_error(pointer, rules.unreadable(path, coming))
            elif role == "output":
                errors += path_error(pointer, rules.unwritable(path, claimed))
                claimed[draft.output_dir] = f"{draft.name} in this chain"
    _refuse(errors)


def _needs(draft: _Draft, drafts: Sequence[_Draft]) -> list[_Draft]:
    """The jobs of this chain that one waits for, directly or not, each once."""
    by_id = {other.id: other for other in drafts}
    found: dict[str, _Draft] = {}
    queue = [draft]
    while queue:
        for needed in queue.pop().depends_on:
            if needed in by_id and needed not in found:
                found[needed] = by_id[needed]
                queue.append(by_id[needed])
    return list(found.values())


def _upstream(draft: _Draft, drafts: Sequence[_Draft]) -> set[Path]:
    return {other.output_dir for other in _needs(draft, drafts)}


def _outside_needs(draft: _Draft, drafts: Sequence[_Draft]) -> set[str]:
    own = {other.id for other in drafts}
    return {needed for one in [draft, *_needs(draft, drafts)] for needed in one.depends_on if needed not in own}


def _new_job(draft: _Draft, now: datetime, keyed: _Keyed | None) -> NewJob:
    request = draft.request
    return NewJob(
        id=draft.id,
        name=draft.name,
        stage=draft.stage,
        params=draft.params.model_dump(mode="json"),
        output_dir=str(draft.output_dir),
        created_at=now,
        depends_on=draft.depends_on,
        priority=request.priority,
        resources=draft.resources,
        policy=Policy(retry=request.retry, max_seconds=request.max_seconds, on_stall=request.on_stall),
        idempotency_key=None if keyed is None else keyed.key,
        body_hash=None if keyed is None else keyed.body_hash,
    )


def _store(runtime: Runtime, drafts: Sequence[_Draft], keyed: _Keyed | None = None) -> list[Job]:
    """Rows and directories or neither: the rows are committed once every directory is there.

    Raises:
        Conflict: jobs with this key were stored meanwhile.
        Unavailable: database or directories cannot be written.
    """
    now = clock.utc_now()
    new = [_new_job(draft, now, keyed) for draft in drafts]
    try:
        with runtime.database.write() as session:
            if keyed is not None and job_queries.jobs_of_key(session, keyed.key):
                raise Conflict(f"jobs with the Idempotency-Key {keyed.key!r} were stored just now")
            job_queries.insert_jobs(session, new)
            jobs = [job for one in new if (job := job_queries.get_job(session, one.id)) is not None]
            for job in jobs:
                write_new(runtime, job)
    except (OSError, Unavailable) as error:
        for one in new:
            shutil.rmtree(runtime.job_dir(one.id).path, ignore_errors=True)
        if isinstance(error, Unavailable):
            raise
        kind = InsufficientStorage if is_full(error) else Unavailable
        raise kind(f"the job directories cannot be written, nothing was stored: {error}") from error
    runtime.wake()
    return jobs
