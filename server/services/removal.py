"""Deleting a job: told first, then done, and finished by the next daemon when this one dies on the way.

    jobs/<id>/delete.json    what shall go besides: {"outputs": directory or null}
    rows                     deleted in a transaction, in which
    jobs/<id> -> trash/<id>  by one rename; from here on it will be done
    outputs                  renamed beside themselves, then removed
    trash/<id>               removed last, delete.json at the very end

Whatever is cut off behind the rename is done by the next start, from trash/<id>/delete.json.
"""

import hashlib
import logging
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, Field

from eagle3_core.contract.jobdir import MARKER_NAME, fsync_directory, read_json, write_json
from eagle3_core.contract.params import STAGES
from server.db.engine import Database
from server.db.queries import jobs as job_queries
from server.db.queries import removal as queries
from server.domain.job import Job
from server.domain.states import FINAL_JOB
from server.errors import Conflict, ServiceError, Unavailable
from server.services.jobs import load_job
from server.services.paths import PathRules, resolve
from server.services.records import Gone, write_record
from server.services.runtime import Runtime
from server.settings import Settings
from server.system.disk import taken_bytes
from server.system.files import remove_tree

logger = logging.getLogger(__name__)

ORDER = "delete.json"


class Removal(BaseModel):
    """What deleting a job removes, or has removed."""

    id: str
    deleted: bool
    paths: list[str] = Field(description="directories that go, with all in them")
    kept: list[str] = Field(description="directories of the job that stay")
    bytes: int = Field(description="of disk that the paths take")
    confirm: str | None = Field(description="send it as `confirm` to have it done; null once it is")


@dataclass(frozen=True)
class _Plan:
    job: Job
    outputs: Path | None
    paths: list[Path]
    kept: list[Path]

    @property
    def token(self) -> str:
        """Good for this state of the job and these paths only."""
        text = "\0".join([self.job.id, str(self.job.version), *(str(path) for path in self.paths)])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def remove(runtime: Runtime, job_id: str, outputs: bool, confirm: str | None) -> Removal:
    """What would go without `confirm`; with the token of that answer, it goes.

    Args:
        runtime: of the daemon.
        job_id: an ended job.
        outputs: also remove an output directory outside the state directory.
        confirm: the token of an earlier answer.

    Raises:
        NotFound: there is no such job.
        Conflict: it has not ended, an unfinished job waits for it or reads from it, the outputs are not its own any
            more, or the token is not that of what would go now.
        Unavailable: the database or the disk cannot be written; the job is as it was.
    """
    plan = _plan(runtime, job_id, outputs)
    taken = sum(taken_bytes(path) for path in plan.paths)
    told = Removal(
        id=job_id,
        deleted=False,
        paths=[str(path) for path in plan.paths],
        kept=[str(path) for path in plan.kept],
        bytes=taken,
        confirm=plan.token,
    )
    if confirm is None:
        return told
    if confirm != plan.token:
        raise Conflict(f"{confirm!r} does not confirm what would be removed now; ask without `confirm` and look again")
    _carry_out(runtime, plan)
    return told.model_copy(update={"deleted": True, "confirm": None})


def _plan(runtime: Runtime, job_id: str, outputs: bool) -> _Plan:
    job = load_job(runtime, job_id)
    if job.state not in FINAL_JOB:
        raise Conflict(f"job {job_id} has not ended: it is {job.state}; cancel it first")
    directory, output = runtime.job_dir(job_id).path, Path(job.output_dir)
    apart = not output.is_relative_to(directory)
    removed = output if outputs and apart and output.exists() else None
    with runtime.database.read() as session:
        waiting = queries.waiting_for(session, job_id)
        held = queries.holds_gpus(session, job_id)
        others = queries.other_output_dirs(session, job_id)
        unfinished = job_queries.unfinished_jobs(session)
    if waiting:
        raise Conflict(f"job {waiting[0]} waits for job {job_id} and has not ended")
    if held:
        raise Conflict(f"processes of job {job_id} still hold a GPU; ask again when they are gone")
    paths = [directory] if removed is None else [directory, removed]
    for one in unfinished:
        if (path := _reads(one, paths)) is not None:
            raise Conflict(f"job {one.id} reads {path} and has not ended")
    if removed is not None:
        _refuse_foreign(runtime.settings, job, removed, others)
    return _Plan(job, removed, paths, [output] if apart and removed is None and output.exists() else [])


def _reads(job: Job, paths: list[Path]) -> str | None:
    """Which input of a job lies in one of the directories."""
    for role, path in STAGES[job.stage].model_validate(job.params).paths().values():
        if role != "output" and any(resolve(path).is_relative_to(directory) for directory in paths):
            return path
    return None


def _refuse_foreign(settings: Settings, job: Job, output: Path, others: dict[str, str]) -> None:
    """Nothing goes but what is the job's own, by its marker and by where it lies."""
    if resolve(output) != output or PathRules(settings).outside(str(output)) is not None:
        text = f"{output} is a link by now, or lies outside the roots"
        raise Conflict(f"{text}: it was not looked into; remove it yourself")
    if not _is_of(job.id, output):
        raise Conflict(f"{output} is not marked as the output of job {job.id}; remove it yourself")
    inner = next((path for path in others if Path(path).is_relative_to(output)), None)
    if inner is not None:
        raise Conflict(f"{output} also holds {inner}, the output of job {others[inner]}; delete that one first")


def _is_of(job_id: str, output: Path) -> bool:
    try:
        return (output / MARKER_NAME).read_text().strip() == job_id
    except (OSError, UnicodeError):
        return False


def _carry_out(runtime: Runtime, plan: _Plan) -> None:
    job_id, settings = plan.job.id, runtime.settings
    directory, gone = runtime.job_dir(job_id).path, settings.trash_dir / job_id
    try:
        with runtime.record_lock:
            settings.trash_dir.mkdir(exist_ok=True)
            remove_tree(gone)
            directory.mkdir(exist_ok=True)  # somebody may have removed it by hand
            write_json(directory / ORDER, {"outputs": None if plan.outputs is None else str(plan.outputs)})
            try:
                with runtime.database.write() as session:
                    had_waited = queries.delete_job(session, job_id)
                    if had_waited is None:
                        raise Conflict(f"job {job_id} is needed or at work again; look at it and ask again")
                    directory.rename(gone)
                    fsync_directory(settings.trash_dir)
            except ServiceError:
                if gone.exists():
                    gone.rename(directory)
                raise
    except OSError as error:
        raise Unavailable(f"job {job_id} was not deleted: {error}") from error
    runtime.snapshots.drop(job_id)
    try:
        for other in had_waited:
            runtime.snapshots.put(write_record(runtime, other))
        _empty(settings, gone)
    except (OSError, Gone) as error:
        logger.error("%s cannot be removed, the next start tries again: %s", gone, error)


def finish_removals(settings: Settings, database: Database) -> None:
    """Do to the end what was cut off. Called before the loop starts."""
    try:
        left = list(settings.trash_dir.iterdir())
    except FileNotFoundError:
        return
    for gone in left:
        try:
            with database.write() as session:
                queries.delete_job(session, gone.name)
            _empty(settings, gone)
        except (OSError, Unavailable) as error:
            logger.error("%s cannot be removed: %s", gone, error)


def _empty(settings: Settings, gone: Path) -> None:
    """Remove the outputs that shall go, then what remains of the job directory."""
    order = read_json(gone / ORDER)
    outputs = order.get("outputs") if isinstance(order, dict) else None
    if isinstance(outputs, str):
        output = Path(outputs)
        aside = output.with_name(f".eyas-deleted-{gone.name}")
        if _is_of(gone.name, output) and resolve(output) == output and PathRules(settings).outside(outputs) is None:
            output.rename(aside)
        remove_tree(aside)
    remove_tree(gone, last=ORDER)
