"""What a job's events add up to. Pure: a status and an event give the next status.

events.jsonl --lines--> read_line --Event--> fold --> Status (stored with the job, shown in GET /jobs/{id})
"""

import json
from datetime import UTC, datetime
from typing import Any

from pydantic import BaseModel, ConfigDict

from eagle3_core.contract.events import (
    CheckpointEvent,
    EpochEvent,
    ErrorEvent,
    Event,
    HeartbeatEvent,
    PhaseEvent,
    ProgressEvent,
    ReportEvent,
    ResultEvent,
    VerdictEvent,
    WarningEvent,
    parse_event,
)

MAX_EVENT_BYTES = 4 << 20
MAX_WARNINGS = 100
MAX_WARNING_TEXT = 2000
MAX_SETUP = 200
MAX_GAPS = 31


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True)


class EpochDone(_Frozen):
    """A finished epoch. Epochs count from 0, as checkpoint directories do."""

    epoch: int
    train_s: float
    val_s: float
    train: dict[str, Any]
    val: dict[str, Any] | None


class JobWarning(_Frozen):
    """A warning and how often it came; `time` is when it came first."""

    code: str
    message: str
    time: datetime
    count: int = 1


class LastCheckpoint(_Frozen):
    """The newest checkpoint; `verdict` is null until the judge has spoken, `why` where it has found nothing wrong."""

    path: str
    verdict: str | None = None
    why: str | None = None


class SetupFact(_Frozen):
    """Something found at the start: sizes, tensors read, parameters, samples, steps."""

    title: str
    text: str
    data: dict[str, Any] = {}


class JobResult(_Frozen):
    """What a finished stage hands over."""

    data: dict[str, Any]
    artifacts: dict[str, str]


class StageError(_Frozen):
    """Why the stage says it failed."""

    exit_code: int
    cause: str
    hint: str | None = None


class Status(_Frozen):
    """All that is known of a job from its events."""

    phase: str | None = None
    epoch: int | None = None
    epochs: int | None = None
    step: int | None = None
    steps: int | None = None
    unit: str | None = None
    loss: float | None = None
    accuracy: list[float | None] | None = None
    lr: float | None = None
    tokens_per_s: float | None = None
    eta_s: float | None = None
    elapsed_s: float | None = None
    epochs_done: list[EpochDone] = []
    warnings: list[JobWarning] = []
    warnings_left_out: int = 0
    last_checkpoint: LastCheckpoint | None = None
    setup: list[SetupFact] = []
    result: JobResult | None = None
    error: StageError | None = None
    last_seq: int = 0
    last_event_at: datetime | None = None
    last_boottime_s: float | None = None
    attempt_boottime_s: float | None = None
    elapsed_before_s: float = 0.0
    worked_boottime_s: float | None = None
    """When the stage's loop last told of its work; heartbeats do not count."""
    paced_boottime_s: float | None = None
    progress_gaps_s: list[float] = []
    """Seconds between the latest progress events of one phase."""
    progress_from: tuple[int, float] | None = None
    """Step and boottime of the attempt's first progress event, for an ETA where the stage gives none."""


def begin_attempt(status: Status, boottime_s: float) -> Status:
    """Start the clock of a new process life; what earlier lives took is kept."""
    return status.model_copy(
        update={
            "elapsed_before_s": status.elapsed_s or 0.0,
            "attempt_boottime_s": boottime_s,
            "last_boottime_s": boottime_s,
            "progress_from": None,
            "worked_boottime_s": boottime_s,
            "paced_boottime_s": None,
            "progress_gaps_s": [],
            "result": None,
            "error": None,
        }
    )


def end_attempt(status: Status, seconds: float | None) -> Status:
    """Stop the clock: nothing remains to be waited for."""
    elapsed = status.elapsed_s if seconds is None else round(status.elapsed_before_s + seconds, 3)
    return status.model_copy(update={"elapsed_s": elapsed, "eta_s": None})


def read_line(line: bytes) -> tuple[Event, str] | None:
    """An event and its text as JSON without NaN, or None for a line that is no event, or that no table can hold."""
    if len(line) > MAX_EVENT_BYTES:
        return None
    try:
        text = json.dumps(json.loads(line, parse_constant=lambda _: None), allow_nan=False)
        event = parse_event(text.encode())
        event.time.astimezone(UTC)
    except (ValueError, OverflowError, RecursionError):
        return None
    return None if event.time.tzinfo is None else (event, text)


def fold(status: Status, event: Event) -> Status:
    """The status after one more event."""
    changes: dict[str, Any] = {
        "last_seq": event.seq,
        "last_event_at": event.time,
        "last_boottime_s": event.boottime_s,
        "elapsed_s": _elapsed(status, event.boottime_s),
        "worked_boottime_s": _worked(status, event),
    }
    match event:
        case PhaseEvent():
            changes |= {"phase": event.phase, "paced_boottime_s": None}
        case ProgressEvent():
            changes |= _progress(status, event) | _pace(status, event.boottime_s)
        case EpochEvent():
            changes |= _epoch(status, event)
        case CheckpointEvent():
            changes["last_checkpoint"] = LastCheckpoint(path=event.path)
        case VerdictEvent():
            changes["last_checkpoint"] = _judged(status, event)
        case ReportEvent():
            fact = SetupFact(title=event.title, text=event.text, data=event.data)
            changes["setup"] = [*status.setup, fact][:MAX_SETUP]
        case WarningEvent():
            return add_warning(status.model_copy(update=changes), event.code, event.message, event.time)
        case ErrorEvent():
            changes["error"] = StageError(exit_code=event.exit_code, cause=event.cause, hint=event.hint)
        case ResultEvent():
            changes["result"] = JobResult(data=event.data, artifacts=event.artifacts)
    return status.model_copy(update=changes)


def add_warning(status: Status, code: str, message: str, time: datetime) -> Status:
    """Count a warning that came before, keep a new one while there is room."""
    message = message[:MAX_WARNING_TEXT]
    warnings = list(status.warnings)
    for place, known in enumerate(warnings):
        if (known.code, known.message) == (code, message):
            warnings[place] = known.model_copy(update={"count": known.count + 1})
            return status.model_copy(update={"warnings": warnings})
    if len(warnings) >= MAX_WARNINGS:
        return status.model_copy(update={"warnings_left_out": status.warnings_left_out + 1})
    warnings.append(JobWarning(code=code, message=message, time=time))
    return status.model_copy(update={"warnings": warnings})


def _elapsed(status: Status, boottime_s: float) -> float | None:
    if status.attempt_boottime_s is None:
        return status.elapsed_s
    return round(status.elapsed_before_s + max(0.0, boottime_s - status.attempt_boottime_s), 3)


def _epoch(status: Status, event: EpochEvent) -> dict[str, Any]:
    done = EpochDone.model_validate(event.model_dump(include=set(EpochDone.model_fields)))
    kept = [earlier for earlier in status.epochs_done if earlier.epoch != done.epoch]
    return {"epoch": event.epoch, "epochs": event.epochs, "epochs_done": [*kept, done]}


def _judged(status: Status, event: VerdictEvent) -> LastCheckpoint:
    """A verdict on an older checkpoint that comes late leaves the newest one as it is."""
    last = status.last_checkpoint
    if last is None or last.path == event.path:
        return LastCheckpoint(path=event.path, verdict=event.verdict, why=_gravest(event.findings))
    return last


def _gravest(findings: list[dict[str, Any]]) -> str | None:
    """What the gravest error or warning says, and how many more there are; the judge sorts them."""
    wrong = [str(one.get("message")) for one in findings if one.get("severity") in ("error", "warning")]
    if not wrong:
        return None
    more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
    return wrong[0][:MAX_WARNING_TEXT] + more


def _worked(status: Status, event: Event) -> float | None:
    quiet = isinstance(event, HeartbeatEvent | WarningEvent)
    return status.worked_boottime_s if quiet else event.boottime_s


def _pace(status: Status, boottime_s: float) -> dict[str, Any]:
    if status.paced_boottime_s is None:
        return {"paced_boottime_s": boottime_s}
    gap = round(max(0.0, boottime_s - status.paced_boottime_s), 3)
    return {"paced_boottime_s": boottime_s, "progress_gaps_s": [*status.progress_gaps_s, gap][-MAX_GAPS:]}


def _progress(status: Status, event: ProgressEvent) -> dict[str, Any]:
    """What a progress event changes; a value the event leaves out keeps its last one, save the ETA."""
    changes = event.model_dump(
        include={"step", "steps", "epoch", "epochs", "loss", "accuracy", "lr", "tokens_per_s", "unit"},
        exclude_none=True,
    )
    if "loss" in event.model_fields_set and event.loss is None:
        changes["loss"] = None  # it was written, and was not finite
    if "steps" in event.model_fields_set and event.steps is None:
        changes["steps"] = None  # what was taken for them was something else
    changes["eta_s"] = event.eta_s
    if event.step is None:
        return changes
    first = status.progress_from
    if first is None or event.step < first[0]:
        first = changes["progress_from"] = (event.step, event.boottime_s)
    if event.eta_s is None and event.step > first[0] and event.steps is not None and event.steps >= event.step:
        pace = (event.boottime_s - first[1]) / (event.step - first[0])
        changes["eta_s"] = round(max(0.0, pace * (event.steps - event.step)), 1)
    return changes
