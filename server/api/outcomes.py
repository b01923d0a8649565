"""What came of a job: its attempts and files, another attempt, and its removal."""

from collections.abc import Iterator
from email.utils import format_datetime
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field

from server.api.context import Context
from server.api.problems import Problem
from server.api.routes import KnownQuery
from server.domain.ranges import Span, Unsatisfiable, span_of
from server.domain.states import JobState
from server.errors import RangeNotSatisfiable
from server.services.artifacts import ArtifactList, OpenArtifact, chunks, list_artifacts, open_artifact
from server.services.attempts import AttemptList, ask_retry, list_attempts
from server.services.removal import Removal, remove

_PROBLEM = {"model": Problem}
_KNOWN: dict[int | str, dict[str, Any]] = {404: _PROBLEM, 422: _PROBLEM}

router = APIRouter(prefix="/jobs/{job_id}", tags=["jobs"], responses=_KNOWN, route_class=KnownQuery)


class Retried(BaseModel):
    """The job after the request; its next attempt follows."""

    id: str
    state: JobState
    attempts: int = Field(description="there were so far")


@router.get("/attempts", operation_id="listAttempts")
def get_attempts(context: Context, job_id: str) -> AttemptList:
    """Each process life of a job with its end, oldest first."""
    return list_attempts(context.runtime, job_id)


@router.post("/retry", status_code=202, operation_id="retryJob", responses={409: _PROBLEM})
def post_retry(context: Context, job_id: str) -> Retried:
    """Give a job that failed or was cancelled another attempt, through the queue; a training goes on from its latest
    sound checkpoint.
    """
    job = ask_retry(context.runtime, job_id)
    number = 0 if job.attempt is None else job.attempt.number
    return Retried(id=job.id, state=job.state, attempts=number)


@router.delete("", operation_id="deleteJob", responses={409: _PROBLEM})
def delete_job(
    context: Context,
    job_id: str,
    outputs: Annotated[bool, Query(description="also an output directory outside its own")] = False,
    confirm: Annotated[str | None, Query(max_length=64, description="as the answer without it told")] = None,
) -> Removal:
    """Without `confirm`: what would be removed. With it: an ended job is removed for good."""
    return remove(context.runtime, job_id, outputs, confirm)


@router.get("/artifacts", operation_id="listArtifacts")
def get_artifacts(context: Context, job_id: str) -> ArtifactList:
    """The files in a job's output directory, by path."""
    return list_artifacts(context.runtime, job_id)


@router.head("/artifacts/{path:path}", include_in_schema=False)
@router.get(
    "/artifacts/{path:path}",
    operation_id="getArtifact",
    response_class=Response,
    responses={
        200: {"content": {"application/octet-stream": {}}, "description": "the file, byte for byte"},
        206: {"content": {"application/octet-stream": {}}, "description": "the part that `Range` asks for"},
        416: _PROBLEM,
    },
)
def get_artifact(
    context: Context,
    request: Request,
    job_id: str,
    path: str,
    range_: Annotated[str | None, Header(alias="Range", description="bytes=0-1023; one part")] = None,
    if_range: Annotated[str | None, Header(description="ETag of the parts before; another version comes whole")] = None,
) -> Response:
    """A file of the output directory; links are not followed."""
    opened = open_artifact(context.runtime, job_id, path)
    try:
        part = span_of(range_ if if_range in (None, opened.etag) else None, opened.size)
    except Unsatisfiable:
        opened.file.close()
        raise RangeNotSatisfiable(f"{path} has {opened.size} bytes", opened.size) from None
    response = _file_response(opened, path.rpartition("/")[2], part)
    if request.method == "HEAD":
        opened.file.close()  # nobody would read it to its end
        return Response(None, response.status_code, response.headers, response.media_type)
    return response


def _file_response(opened: OpenArtifact, name: str, part: Span | None) -> Response:
    span = part or Span(0, opened.size)
    headers = {
        "Accept-Ranges": "bytes",
        "Content-Length": str(span.length),
        "Content-Disposition": f"attachment; filename*=UTF-8''{quote(name, safe='')}",
        "ETag": opened.etag,
        "Last-Modified": format_datetime(opened.modified_at, usegmt=True),
    }
    if part is not None:
        headers["Content-Range"] = f"bytes {span.start}-{span.start + span.length - 1}/{opened.size}"
    body: Iterator[bytes] = chunks(opened, span)
    status = 200 if part is None else 206
    return StreamingResponse(body, status, headers, media_type="application/octet-stream")
