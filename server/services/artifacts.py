"""What a job has written: the files of its output directory, and their bytes."""

import heapq
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO, Literal

from pydantic import BaseModel, Field

from eagle3_core.contract.jobdir import MARKER_NAME
from server.db.queries import events as event_queries
from server.domain.job import Job
from server.domain.ranges import Span
from server.errors import Forbidden, NotFound
from server.services.jobs import load_job
from server.services.runtime import Runtime
from server.system.beneath import open_beneath
from server.system.files import Entry, walk

MAX_ENTRIES = 10_000
CHUNK = 1 << 20

Role = Literal["checkpoint", "hidden_states", "index", "vocabulary_map", "tokens", "report", "link", "file"]

_BY_NAME: dict[str, Role] = {
    "index.json": "index",
    "prepared.json": "index",
    "vocab_map.safetensors": "vocabulary_map",
    "rows.safetensors": "tokens",
    "report.json": "report",
}


class Artifact(BaseModel):
    """A file in the output directory."""

    path: str = Field(description="below the output directory")
    bytes: int
    modified_at: datetime
    role: Role = Field(description="what it is, as far as name and place tell")
    target: str | None = Field(description="of a link: where it leads; links are not followed")


class ArtifactList(BaseModel):
    """By path. `truncated`: there are more than 10,000; the rest is left out, also of `total_bytes`."""

    output_dir: str
    artifacts: list[Artifact]
    total_bytes: int
    truncated: bool


@dataclass(frozen=True)
class OpenArtifact:
    """A file that is open, and what names this version of it."""

    file: BinaryIO
    size: int
    etag: str
    modified_at: datetime


def list_artifacts(runtime: Runtime, job_id: str) -> ArtifactList:
    """The files in the output directory of a job.

    Raises:
        NotFound: there is no such job.
        Forbidden: its output directory lies outside the roots by now.
    """
    job = load_job(runtime, job_id)
    _root_of(runtime, job)
    with runtime.database.read() as session:
        checkpoints = [Path(one.path) for one in event_queries.checkpoints(session, job.id)]
    directory = Path(job.output_dir)
    # One more than is shown; which of too many is a matter of luck, but never of memory.
    found = heapq.nsmallest(MAX_ENTRIES + 1, walk(directory, 10 * MAX_ENTRIES), key=lambda entry: entry.path)
    shown = [entry for entry in found if entry.path != MARKER_NAME]
    return ArtifactList(
        output_dir=job.output_dir,
        artifacts=[_artifact(entry, directory, checkpoints) for entry in shown[:MAX_ENTRIES]],
        total_bytes=sum(entry.size for entry in shown[:MAX_ENTRIES]),
        truncated=len(shown) > MAX_ENTRIES,
    )


def _artifact(entry: Entry, directory: Path, checkpoints: list[Path]) -> Artifact:
    place = directory / entry.path
    role: Role = "file"
    if entry.target is not None:
        role = "link"
    elif any(place.is_relative_to(one) for one in checkpoints):
        role = "checkpoint"
    elif place.name in _BY_NAME:
        role = _BY_NAME[place.name]
    elif place.name.startswith("shard_") and place.suffix == ".safetensors":
        role = "hidden_states"
    elif place.suffix == ".json":
        role = "report"
    return Artifact(
        path=entry.path,
        bytes=entry.size,
        modified_at=datetime.fromtimestamp(entry.modified_s, UTC),
        role=role,
        target=entry.target,
    )


def _root_of(runtime: Runtime, job: Job) -> Path:
    """The allowed directory that holds the output directory.

    Raises:
        Forbidden: none does by now.
    """
    output = Path(job.output_dir)
    for root in runtime.settings.all_roots:
        if output.is_relative_to(root):
            return root
    raise Forbidden(f"{output}, where job {job.id} wrote, lies outside the allowed roots by now")


def open_artifact(runtime: Runtime, job_id: str, path: str) -> OpenArtifact:
    """One file of the output directory, opened without following a link anywhere.

    Raises:
        NotFound: no such job, or no such file; a link is none.
        Forbidden: its output directory lies outside the roots by now.
    """
    job = load_job(runtime, job_id)
    root = _root_of(runtime, job)
    try:
        if ".." in Path(path).parts or "\0" in path or path.startswith("/"):
            raise FileNotFoundError(path)
        file = open_beneath(root, Path(job.output_dir) / path)
    except OSError:
        raise NotFound(f"job {job.id} has no file {path!r}; links are not followed") from None
    status = os.fstat(file.fileno())
    assert stat.S_ISREG(status.st_mode)
    return OpenArtifact(
        file,
        status.st_size,
        f'"{status.st_ino:x}-{status.st_size:x}-{status.st_mtime_ns:x}"',
        datetime.fromtimestamp(status.st_mtime, UTC),
    )


def chunks(opened: OpenArtifact, span: Span) -> Iterator[bytes]:
    """The bytes of a part of the file, a megabyte at a time; closes it. Fewer when it was cut meanwhile."""
    with opened.file as file:
        file.seek(span.start)
        left = span.length
        while left > 0 and (data := file.read(min(CHUNK, left))):
            left -= len(data)
            yield data
