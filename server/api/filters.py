"""The query parameters that narrow a list of jobs."""

from datetime import UTC, datetime
from typing import Annotated

from fastapi import Query

from eagle3_core.contract.params import STAGES
from server.domain.listing import JobFilter
from server.domain.states import JobState
from server.domain.words import nearest
from server.errors import FieldError, Invalid

Word = Annotated[str, Query(min_length=1, max_length=200)]


def job_filter(
    state: Annotated[list[JobState] | None, Query(max_length=20, description="repeat it for any of several")] = None,
    stage: Annotated[list[Word] | None, Query(max_length=20, description="repeat it for any of several")] = None,
    name: Annotated[list[Word] | None, Query(max_length=20, description="repeat it for any of several")] = None,
    label: Annotated[
        list[Annotated[str, Query(min_length=1, max_length=264)]] | None,
        Query(max_length=20, description="key=value, or key for any value; several keys must all hold"),
    ] = None,
    since: Annotated[
        datetime | None, Query(description="submitted then or later: RFC 3339, UTC where no zone is said")
    ] = None,
    pipeline: Annotated[str | None, Query(max_length=64, description="id of a pipeline")] = None,
) -> JobFilter:
    """Which jobs are asked for.

    Raises:
        Invalid: a stage there is not, or a time that no calendar has in UTC.
    """
    for place, one in enumerate(stage or ()):
        if one not in STAGES:
            text, near = f"{one!r} is not a stage; there are {', '.join(sorted(STAGES))}", nearest(one, STAGES)
            raise Invalid.of([FieldError(f"?stage/{place}", text, near)])
    labels: dict[str, tuple[str, ...]] = {}
    for one in label or ():
        key, equals, value = one.partition("=")
        labels[key] = (*labels.get(key, ()), value) if equals else labels.get(key, ())
    try:
        moment = None if since is None else (since if since.tzinfo else since.replace(tzinfo=UTC)).astimezone(UTC)
    except OverflowError:
        raise Invalid.of([FieldError("?since", "is outside of what a calendar holds")]) from None
    return JobFilter(
        states=tuple(state or ()),
        stages=tuple(stage or ()),
        names=tuple(name or ()),
        labels=labels,
        since=moment,
        pipeline=pipeline,
    )
