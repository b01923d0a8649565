"""Commands to the shim and the stage: small whole files in the job's control directory.

    cancel.json, pause.json, stop.json    the loop      stop the stage, for that reason
    checkpoint.json, stack.json           a request     once for each id

The files of an attempt that has ended are removed before the next one starts; a cancel never is.
"""

import contextlib
from pathlib import Path
from typing import Any

from eagle3_core.contract.jobdir import JobDir, read_json, write_json
from server.domain.job import PAUSE, Job
from server.settings import Settings


class Orders:
    """Writes what the intents of jobs ask for, each once, and a cancel again when it was made quicker."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._cancels: dict[str, tuple[float, bool]] = {}

    def write(self, job: Job, directory: JobDir, by_policy: str | None) -> None:
        """Order what the job's intents, or its policy, ask of a living attempt."""
        if job.cancel_asked_at is not None:
            wanted = (self.cancel_grace(job), job.cancel_checkpoint)
            if not directory.cancel.exists() or self._cancels.get(job.id, wanted) != wanted:
                order_stop(directory, *wanted)
            self._cancels[job.id] = wanted
        elif by_policy is not None and not directory.stop.exists():
            with contextlib.suppress(OSError):  # a full disk: tried again at the next look
                write_json(directory.stop, {"grace_s": self._settings.grace_s, "reason": by_policy})
        elif job.pause_asked_at is not None and not directory.pause.exists():
            _order(directory.pause, {"grace_s": self.pause_grace(job)})

    def grace(self, job: Job) -> float:
        """Seconds a stage that was asked to stop has before it is killed."""
        if job.cancel_asked_at is not None:
            return self.cancel_grace(job)
        stopped_for_pause = job.attempt is not None and job.attempt.stop_for == PAUSE
        return self.pause_grace(job) if stopped_for_pause else self._settings.grace_s

    def cancel_grace(self, job: Job) -> float:
        """The grace of a cancel."""
        return self._settings.grace_s if job.cancel_grace_s is None else job.cancel_grace_s

    def pause_grace(self, job: Job) -> float:
        """The grace of a pause."""
        return self._settings.grace_s if job.pause_grace_s is None else job.pause_grace_s

    def forget(self, job_id: str) -> None:
        """Its attempt has ended."""
        self._cancels.pop(job_id, None)


def order_stop(directory: JobDir, grace_s: float, checkpoint: bool = True) -> None:
    """Write control/cancel.json."""
    _order(directory.cancel, {"grace_s": grace_s, "checkpoint": checkpoint})


def order_once(path: Path, request_id: str) -> None:
    """Write a command that is carried out once for each id.

    Raises:
        OSError: the disk is full.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"id": request_id})


def clear_orders(directory: JobDir) -> None:
    """Remove what was meant for an earlier attempt."""
    for path in (directory.pause, directory.stop, directory.checkpoint, directory.stack):
        path.unlink(missing_ok=True)


def policy_stop(directory: JobDir) -> str | None:
    """The reason in control/stop.json; None while there is none, and for a broken one, which gives no reason."""
    try:
        found = read_json(directory.stop)
    except (ValueError, RecursionError):
        return None
    return str(found["reason"]) if isinstance(found, dict) and "reason" in found else None


def _order(path: Path, content: dict[str, Any]) -> None:
    """A cancel or a pause. On a full disk an empty file, which takes no block, is an order as well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        write_json(path, content)
    except OSError:
        path.touch()
