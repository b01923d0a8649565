"""When a running job counts as stalled: no progress for far longer than its own pace. By boottime alone.

heartbeat    a thread of the stage tells that the process lives
progress     its loop tells that the work goes on: progress, phase, epoch, checkpoint, verdict, report, metric
"""

from dataclasses import dataclass
from statistics import median

from server.domain.progress import Status

SILENT_PHASES = frozenset(
    {"importing", "loading", "validating", "saving", "judging", "writing", "checking", "verifying"}
)
"""Phases that report no progress of their own; loading a verifier can take 24 minutes."""

FOREIGN_STAGES = frozenset({"external", "adopt"})
"""Programs that are not ours: silence means something only once their output has shown a pace, and they save and
validate without a word.
"""


@dataclass(frozen=True)
class StallLimits:
    """Settings: `factor` times the median time between progress events, but not less than the floor, in seconds."""

    factor: float = 20.0
    floor_s: float = 120.0
    silent_floor_s: float = 1800.0


def allowance_s(status: Status, stage: str, limits: StallLimits) -> float | None:
    """Seconds without progress after which a job in this phase is stalled; None where that cannot be told."""
    foreign = stage in FOREIGN_STAGES
    if foreign and not status.progress_gaps_s:
        return None
    silent = foreign or status.phase is None or status.phase in SILENT_PHASES
    floor = limits.silent_floor_s if silent else limits.floor_s
    return max(floor, limits.factor * median(status.progress_gaps_s)) if status.progress_gaps_s else floor


def idle_s(status: Status, boottime_s: float) -> float | None:
    """Seconds since the loop last told of its work; None before the attempt began."""
    return None if status.worked_boottime_s is None else max(0.0, boottime_s - status.worked_boottime_s)
