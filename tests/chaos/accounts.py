"""Settling up: what the witness saw against what the daemon says."""

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FINAL = frozenset({"succeeded", "failed", "cancelled"})
LONGEST_S = 600.0


@dataclass
class Order:
    """One job as it was asked for, and what was done to it."""

    name: str
    kind: str
    file: Path
    request: dict[str, Any]
    id: str | None = None
    cancel_asked: bool = False
    hurt: set[str] = field(default_factory=set)
    seen_final: str | None = None

    @property
    def told(self) -> list[list[str]]:
        """The witness's lines, as words."""
        return [line.split() for line in self.file.read_text().splitlines()] if self.file.exists() else []

    @property
    def starts(self) -> list[str]:
        """The attempt of each true start."""
        return [words[1] for words in self.told if words[0] == "start"]

    def ended(self, code: int) -> bool:
        """Whether it truly ended of its own accord with this code."""
        return any(words[:2] == ["end", str(code)] for words in self.told)


@dataclass
class Faults:
    """What must not be, each with a line that says where."""

    lost: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    wrong_state: list[str] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)
    zombies: list[str] = field(default_factory=list)
    lock_errors: list[str] = field(default_factory=list)

    def counts(self) -> dict[str, int]:
        """Field -> how many."""
        return {name: len(lines) for name, lines in vars(self).items()}

    def lines(self) -> list[str]:
        """All of them, to be read."""
        return [f"{name}: {line}" for name, lines in vars(self).items() for line in lines]


def settle(order: Order, job: dict[str, Any] | None, record: Path, faults: Faults) -> None:
    """Judge one job: its view as the daemon gives it, its record.json, the witness's file."""
    if job is None or job["state"] not in FINAL:
        faults.lost.append(f"{order.name} ({order.id}): {None if job is None else job['summary']}")
        return
    written = json.loads(record.read_bytes())["state"] if record.exists() else None
    if written != job["state"]:
        faults.lost.append(f"{order.name} ({order.id}): its record says {written}, the daemon {job['state']}")
    twice = [attempt for attempt, count in Counter(order.starts).items() if count > 1]
    if twice or len(order.starts) > (job["attempt"] or 0):
        faults.doubled.append(f"{order.name} ({order.id}): starts {order.starts}, {job['attempt']} attempts")
    clashes = {words[1] for words in order.told if words[0] == "clash"}
    faults.doubled += [f"{order.name} ({order.id}): {gpu} was somebody else's as well" for gpu in sorted(clashes)]
    wanted = order.request.get("resources", {}).get("gpus", 0)
    if order.starts and len(job["gpus"]) != wanted:
        faults.wrong_state.append(f"{order.name} ({order.id}): asked for {wanted} GPUs, got {job['gpus']}")
    fault = contradiction(order, job)
    if fault is not None:
        faults.wrong_state.append(
            f"{order.name} ({order.id}, {order.kind}, hurt {sorted(order.hurt)}): {fault}; {job['summary']}; "
            f"witness {[' '.join(words) for words in order.told]}"
        )


def contradiction(order: Order, job: dict[str, Any]) -> str | None:
    """Why the final state cannot be, or None."""
    state = job["state"]
    if order.seen_final not in (None, state):
        return f"it was {order.seen_final} before"
    if job["elapsed_s"] is not None and not 0 <= job["elapsed_s"] <= LONGEST_S:
        return f"it is said to have taken {job['elapsed_s']} s"
    if state == "succeeded":
        return None if order.ended(0) else "it never came to its end"
    if state == "cancelled":
        return None if order.cancel_asked else "nobody asked for a cancel"
    if "stage" in order.hurt or ("shim" in order.hurt and not order.starts):
        return None
    if "disk" in order.hurt and not order.ended(3):
        told = job["reason"] == "disk_full" or (order.ended(28) and "exited with code 28" in (job["cause"] or ""))
        if "shim" in order.hurt:  # nobody recorded the end, and that of the attempt that followed may be anything
            told = told or job["reason"] in ("worker_lost", "spawn_failed")
        return None if told else "the disk was full, and its reason is another one"
    if order.kind == "failing" and order.ended(3):
        told = "exited with code 3 of its own accord" in (job["cause"] or "") or "shim" in order.hurt
        return None if told else "the cause is not the program's exit code"
    return "nothing happened to it that fails a job"
