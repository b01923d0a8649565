"""Stages run in this process, without a daemon. What they print goes to standard error."""

import contextlib
import importlib
import json
import sys
from pathlib import Path
from typing import Any

from eagle3_core.contract.events import EventWriter
from eagle3_core.contract.params import STAGES
from worker.context import StageContext, StageResult


def run_stage(stage: str, place: Path, **params: Any) -> tuple[StageResult, list[dict[str, Any]]]:
    """Result and events; outputs are in `place`/out."""
    (place / "out").mkdir(parents=True)
    events = EventWriter(place / "events.jsonl")
    told = {name: str(value) if isinstance(value, Path) else value for name, value in params.items()}
    context = StageContext("bench", STAGES[stage](**told), place / "out", events, place / "control")
    with contextlib.redirect_stdout(sys.stderr):
        result = importlib.import_module(f"worker.stages.{stage}").run(context)
    events.close()
    return result, [json.loads(line) for line in (place / "events.jsonl").read_bytes().splitlines()]
