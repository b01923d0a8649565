"""The jobs of a request, worked out and checked; nothing is stored.

names -> stages and params -> dependencies (no cycle) -> paths -> content -> space -> resources
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import ValidationError

from eagle3_core.contract.params import STAGES, StageParams
from server.db.queries import jobs as job_queries
from server.domain.faults import fault_of
from server.domain.ids import is_job_id
from server.domain.resources import BY_STAGE, Resources
from server.domain.words import nearest
from server.errors import MAX_ERRORS, FieldError, Forbidden, Invalid
from server.services.adoption import complete
from server.services.conflicts import Doubt, find_conflicts
from server.services.paths import PathRules, path_error, resolve
from server.services.preflight import check_content
from server.services.programs import refuse_foreign_programs
from server.services.remote_code import refuse_remote_code
from server.services.requests import JobRequest
from server.services.runtime import Runtime
from server.services.settling import settle
from server.services.space import Planned


@dataclass(frozen=True)
class Placed:
    """A job of a request: where in the body it stands, and the id it will have."""

    pointer: str
    request: JobRequest
    id: str


@dataclass(frozen=True)
class Draft:
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
    doubts: tuple[Doubt, ...] = ()


def draft_all(runtime: Runtime, placed: Sequence[Placed]) -> list[Draft]:
    """The jobs of a request, checked.

    Raises:
        Invalid: with a pointer to each faulty field.
        Forbidden: a path lies outside the roots, or a program is not allowed.
        InsufficientStorage: what the jobs would write does not fit.
    """
    drafts = [_draft(runtime, one) for one in placed]
    named = [(f"{draft.pointer}/params", draft.params) for draft in drafts]
    refuse_foreign_programs(runtime.settings, named)
    refuse_remote_code(runtime.settings, named)
    _refuse(_duplicate_names(drafts))
    drafts = _with_dependencies(runtime, drafts)
    _check_paths(runtime, drafts)
    for draft in drafts:
        _refuse(list(check_content(draft.params, f"{draft.pointer}/params")))
    drafts = [_agreeing(draft, drafts) for draft in drafts]
    _check_space(runtime, drafts)
    return [replace(draft, resources=_resources(runtime, draft)) for draft in drafts]


def _agreeing(draft: Draft, drafts: Sequence[Draft]) -> Draft:
    """The draft with the doubts there are about it."""
    makers = {other.output_dir: other.params for other in needs_of(draft, drafts)}
    found = find_conflicts(draft.params, f"{draft.pointer}/params", makers)
    _refuse(found.certain)
    return replace(draft, doubts=tuple(found.doubtful))


def _resources(runtime: Runtime, draft: Draft) -> Resources:
    return settle(runtime.hardware, draft.request.resources, draft.params, draft.pointer)


def _check_space(runtime: Runtime, drafts: Sequence[Draft]) -> None:
    planned = [Planned(draft.pointer, draft.name, draft.params, draft.output_dir) for draft in drafts]
    with runtime.database.read() as session:
        unfinished = job_queries.unfinished_jobs(session)
    runtime.space.refuse_what_cannot_fit(planned, unfinished)


def _refuse(errors: Sequence[FieldError]) -> None:
    if errors:
        raise Invalid.of(errors)


def _draft(runtime: Runtime, placed: Placed) -> Draft:
    request, pointer = placed.request, placed.pointer
    params_class = STAGES.get(request.stage)
    if params_class is None:
        text = f"{request.stage!r} is not a stage; there are {', '.join(sorted(STAGES))}"
        raise Invalid.of([FieldError(f"{pointer}/stage", text, nearest(request.stage, STAGES))])
    try:
        params = params_class.model_validate(request.params)
    except ValidationError as error:
        shown = _field_errors(error, params_class, f"{pointer}/params")
        raise Invalid.of(shown, error.error_count()) from None
    params = complete(params, f"{pointer}/params")
    named = params.paths().get("output_dir")
    output_dir = runtime.job_dir(placed.id).artifacts if named is None else resolve(named[1])
    return Draft(placed.id, request.name or request.stage, pointer, request.stage, params, request, output_dir)


def _field_errors(error: ValidationError, params_class: type[StageParams], pointer: str) -> list[FieldError]:
    found = error.errors(include_url=False)[:MAX_ERRORS]
    faults = [fault_of(one, one["loc"], params_class, f" of {params_class.stage}") for one in found]
    return [replace(fault, pointer=pointer + fault.pointer) for fault in faults]


def _duplicate_names(drafts: Sequence[Draft]) -> list[FieldError]:
    seen: dict[str, str] = {}
    errors = []
    for draft in drafts:
        if draft.name in seen:
            text = f"{draft.name!r} is also the name of {seen[draft.name]}; names in a chain must differ"
            errors.append(FieldError(f"{draft.pointer}/name", text))
        seen.setdefault(draft.name, draft.pointer)
    return errors


def _with_dependencies(runtime: Runtime, drafts: Sequence[Draft]) -> list[Draft]:
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


def _cycle(drafts: Sequence[Draft]) -> list[FieldError]:
    """A fault for each job that waits, in the end, for itself."""
    left = {draft.id: draft for draft in drafts}
    while free := [draft for draft in left.values() if not any(needed in left for needed in draft.depends_on)]:
        for draft in free:
            del left[draft.id]
    names = ", ".join(draft.name for draft in left.values())
    text = f"these jobs wait for one another in a circle: {names}"
    return [FieldError(f"{draft.pointer}/depends_on", text) for draft in left.values()]


def _check_paths(runtime: Runtime, drafts: Sequence[Draft]) -> None:
    rules = PathRules(runtime.settings)
    outside = [
        FieldError(f"{draft.pointer}/params/{field}", fault)
        for draft in drafts
        for field, fault in rules.refused(draft.params)
    ]
    if outside:
        raise Forbidden(f"{outside[0].pointer}: {outside[0].message}", outside)
    with runtime.database.read() as session:
        claimed = {
            Path(path): f"job {job}, which has not ended" for path, job in job_queries.live_output_dirs(session).items()
        }
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


def needs_of(draft: Draft, drafts: Sequence[Draft]) -> list[Draft]:
    """The jobs of this chain that one waits for, directly or not, each once."""
    by_id = {other.id: other for other in drafts}
    found: dict[str, Draft] = {}
    queue = [draft]
    while queue:
        for needed in queue.pop().depends_on:
            if needed in by_id and needed not in found:
                found[needed] = by_id[needed]
                queue.append(by_id[needed])
    return list(found.values())


def _upstream(draft: Draft, drafts: Sequence[Draft]) -> set[Path]:
    return {other.output_dir for other in needs_of(draft, drafts)}


def _outside_needs(draft: Draft, drafts: Sequence[Draft]) -> set[str]:
    own = {other.id for other in drafts}
    return {needed for one in [draft, *needs_of(draft, drafts)] for needed in one.depends_on if needed not in own}
