"""How a stage ends: exit codes, reasons, and the record the shim writes. Standard library only.

A stage is done when it wrote a `result` event AND exited 0. Asked to stop, it exits STOPPED, never 0.
"""

from enum import IntEnum, StrEnum


class ExitCode(IntEnum):
    """Exit status of a stage process."""

    DONE = 0
    INTERNAL_ERROR = 1
    BAD_INPUT = 2
    BAD_DATA = 3
    DIVERGED = 4
    OUT_OF_GPU_MEMORY = 5
    INVALID_CHECKPOINT = 6
    GATE_NOT_MET = 7
    DISK_FULL = 8
    OUT_OF_HOST_MEMORY = 9
    IMPORT_ERROR = 10
    PROGRAM_FAILED = 11
    STOPPED = 75


DEFAULT_GRACE_S = 30.0
"""Seconds between SIGTERM and SIGKILL when nobody says otherwise."""


class Reason(StrEnum):
    """Why a job ended, from evidence; kept apart from its state."""

    BAD_INPUT = "bad_input"
    BAD_DATA = "bad_data"
    DIVERGED = "diverged"
    INVALID_CHECKPOINT = "invalid_checkpoint"
    GATE_NOT_MET = "gate_not_met"
    OUT_OF_GPU_MEMORY = "out_of_gpu_memory"
    OUT_OF_HOST_MEMORY = "out_of_host_memory"
    SHARED_MEMORY_EXHAUSTED = "shared_memory_exhausted"
    DISK_FULL = "disk_full"
    STORAGE_FAILED = "storage_failed"
    COLLECTIVE_FAILED = "collective_failed"
    IMPORT_ERROR = "import_error"
    STALLED = "stalled"
    TIME_LIMIT = "time_limit"
    PREEMPTED = "preempted"
    NODE_FAILED = "node_failed"
    KILLED_BY_SIGNAL = "killed_by_signal"
    SPAWN_FAILED = "spawn_failed"
    WORKER_LOST = "worker_lost"
    HOST_REBOOTED = "host_rebooted"
    CANCELLED_BY_USER = "cancelled_by_user"
    DEPENDENCY_FAILED = "dependency_failed"
    INTERNAL_ERROR = "internal_error"


REASON_OF_EXIT: dict[int, Reason] = {
    ExitCode.INTERNAL_ERROR: Reason.INTERNAL_ERROR,
    ExitCode.BAD_INPUT: Reason.BAD_INPUT,
    ExitCode.BAD_DATA: Reason.BAD_DATA,
    ExitCode.DIVERGED: Reason.DIVERGED,
    ExitCode.OUT_OF_GPU_MEMORY: Reason.OUT_OF_GPU_MEMORY,
    ExitCode.INVALID_CHECKPOINT: Reason.INVALID_CHECKPOINT,
    ExitCode.GATE_NOT_MET: Reason.GATE_NOT_MET,
    ExitCode.DISK_FULL: Reason.DISK_FULL,
    ExitCode.OUT_OF_HOST_MEMORY: Reason.OUT_OF_HOST_MEMORY,
    ExitCode.IMPORT_ERROR: Reason.IMPORT_ERROR,
    ExitCode.PROGRAM_FAILED: Reason.INTERNAL_ERROR,
}
