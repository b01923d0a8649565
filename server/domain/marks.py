"""How far a job is for whoever waits: the version at which each kind of news last occurred.

A client sends the version it knows, and "has there been a checkpoint since?" is a comparison of two numbers, also
after a restart of the daemon. What counts as which kind: changes.py.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class Until(StrEnum):
    """What a client waits for."""

    CHANGE = "change"
    PROGRESS = "progress"
    EPOCH = "epoch"
    CHECKPOINT = "checkpoint"
    TERMINAL = "terminal"


@dataclass(frozen=True)
class Marks:
    """The version of the job at which each kind of news last occurred; 0: never."""

    progress: int = 1
    change: int = 1
    epoch: int = 0
    checkpoint: int = 0

    @classmethod
    def all_at(cls, version: int) -> "Marks":
        """Everything is new at this version."""
        return cls(version, version, version, version)

    def of(self, until: Until) -> int | None:
        """The one of a kind; None for an end, of which the state tells."""
        kinds = {
            Until.PROGRESS: self.progress,
            Until.CHANGE: self.change,
            Until.EPOCH: self.epoch,
            Until.CHECKPOINT: self.checkpoint,
        }
        return kinds.get(until)


class Standing(NamedTuple):
    """How far a job is, as far as somebody who waits for news of many is concerned."""

    id: str
    version: int
    change_version: int
    state: str


FIRST = Marks()
"""Of a job that was just stored."""
