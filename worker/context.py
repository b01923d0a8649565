"""What a stage is given: its parameters, its places on disk, its voice, and whether it was asked to stop."""

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle3_core.contract.events import EventWriter
from eagle3_core.contract.jobdir import read_json
from eagle3_core.contract.params import StageParams


@dataclass(frozen=True)
class StageResult:
    """What `run` returns: `data` becomes the job's result, `artifacts` maps a name to an absolute path."""

    data: dict[str, Any] = field(default_factory=dict)
    artifacts: dict[str, str] = field(default_factory=dict)


class Stopped(Exception):
    """The stage was asked to stop and has put its work down; ends with exit code STOPPED."""


@dataclass
class StageContext:
    """Passed to `run(context)` of every stage."""

    job_id: str
    params: StageParams
    output_dir: Path
    events: EventWriter
    control: Path
    stop_requested: threading.Event = field(default_factory=threading.Event)

    def check_stop(self) -> None:
        """Raise Stopped once a stop was asked for. Call it between steps."""
        if self.stop_requested.is_set():
            raise Stopped

    def save_when_stopped(self) -> bool:
        """Whether to save before stopping: unless a cancel says that the work is not wanted."""
        return bool(self._order("cancel.json", {"checkpoint": True}).get("checkpoint", False))

    def checkpoint_asked(self) -> str | None:
        """Id of the latest request for a checkpoint, or None."""
        asked = self._order("checkpoint.json", {}).get("id")
        return None if asked is None else str(asked)

    def _order(self, name: str, absent: dict[str, Any]) -> dict[str, Any]:
        """A command file of the control directory; a broken one orders nothing in particular."""
        try:
            order = read_json(self.control / name)
        except ValueError:
            return {}
        if order is None:
            return absent
        return order if isinstance(order, dict) else {}

    def phase(self, name: str) -> None:
        """Say what kind of work begins, in the log and as an event."""
        print(f"== {name}", flush=True)
        self.events.write("phase", phase=name)

    def report(self, title: str, text: str, **data: Any) -> None:
        """Print a fact found at the start and report it as an event."""
        print(f"{title}: {text}", flush=True)
        self.events.write("report", title=title, text=text, data=data)

    def warn(self, code: str, message: str) -> None:
        """Print and report something that does not stop the job."""
        print(f"warning [{code}]: {message}", flush=True)
        self.events.write("warning", code=code, message=message)
