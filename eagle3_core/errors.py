"""Errors a user can cause, and the exit code each one ends a stage with.

    Eagle3Error            (ValueError)
    |- BadInput            a request, path or config that cannot work       exit 2
    |  |- CheckpointError  a checkpoint that is damaged or contradicts itself
    |  |  |- NotADrafter   a sound config.json of another kind of model
    |  |  |- NameClash     a tensor that is there twice
    |  |- UnreadableFile   a weight file whose bytes are not what its name or header says
    |- BadData             data that is damaged, empty or contradicts itself exit 3
    |  |- BadRow           one row of a data file that cannot be used
    |- Diverged            a loss or gradient that is not finite             exit 4
    |- InvalidCheckpoint   a checkpoint this job wrote was judged invalid    exit 6
    |- GateNotMet          a quality the request asked for was not reached    exit 7
    |- ProgramFailed       the program of an `external` stage exited non-zero  exit 11

Messages name the file, tensor, key or line, and say what to do.
"""

from pathlib import Path
from typing import ClassVar

from eagle3_core.contract.exits import ExitCode


class Eagle3Error(ValueError):
    """Base of every error whose message is meant for the user."""

    exit_code: ClassVar[ExitCode] = ExitCode.INTERNAL_ERROR
    hint: str | None = None


class BadInput(Eagle3Error):
    """A request, path or config that cannot work."""

    exit_code = ExitCode.BAD_INPUT


class CheckpointError(BadInput):
    """A checkpoint that cannot be read, or contradicts itself or the request."""


class NotADrafter(CheckpointError):
    """A config.json that can be read, but is of another kind of model."""


class NameClash(CheckpointError):
    """A tensor that is there twice, under two names or in two files."""


class UnreadableFile(BadInput):
    """A weight file whose bytes are not what its name or header says.

    `kind` is a stable word for the fault, `tensor` the tensor it was found at, if it was.
    """

    def __init__(self, path: Path, kind: str, message: str, tensor: str | None = None) -> None:
        self.path = path
        self.kind = kind
        self.detail = message
        self.tensor = tensor
        super().__init__(f"{path}: {message}")


class BadData(Eagle3Error):
    """Training data or hidden states that are damaged, empty or contradictory."""

    exit_code = ExitCode.BAD_DATA


class BadRow(BadData):
    """One row of a data file that cannot be used. `reason` is a stable word; a `damaged` one is no row at all."""

    def __init__(self, reason: str, message: str, damaged: bool = False) -> None:
        self.reason = reason
        self.damaged = damaged
        super().__init__(message)


class Diverged(Eagle3Error):
    """A loss or gradient that is not finite."""

    exit_code = ExitCode.DIVERGED


class InvalidCheckpoint(Eagle3Error):
    """A checkpoint written by this very job was judged invalid."""

    exit_code = ExitCode.INVALID_CHECKPOINT


class GateNotMet(Eagle3Error):
    """A quality the request asked for was not reached."""

    exit_code = ExitCode.GATE_NOT_MET


class ProgramFailed(Eagle3Error):
    """The program of an `external` stage ended of its own accord with another code than 0."""

    exit_code = ExitCode.PROGRAM_FAILED
