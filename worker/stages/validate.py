"""validate: a verdict on one checkpoint. An invalid one ends the job failed, with the verdict on record."""

import time
from pathlib import Path

from eagle3_core.checkpoint.judge import judge
from eagle3_core.contract.jobdir import write_json
from eagle3_core.contract.params import ValidateParams
from eagle3_core.errors import InvalidCheckpoint
from worker.context import StageContext, StageResult

VERDICT_NAME = "verdict.json"


def run(context: StageContext) -> StageResult:
    """Judge, report, write verdict.json.

    Raises:
        InvalidCheckpoint: the verdict is invalid or unreadable; names the first findings.
    """
    params = context.params
    assert isinstance(params, ValidateParams)
    context.phase("judging")
    started = time.monotonic()
    verdict = judge(
        Path(params.checkpoint),
        previous=None if params.previous is None else Path(params.previous),
        verifier=None if params.verifier is None else Path(params.verifier),
    )
    seconds = time.monotonic() - started
    findings = verdict.to_dict()["findings"]
    for finding in verdict.findings:
        where = ": ".join(part for part in (finding.file, finding.tensor) if part)
        print(f"{finding.severity} [{finding.code}] {where}: {finding.message}", flush=True)
    print(f"verdict: {verdict.verdict} in {seconds:.2f} s", flush=True)
    file = context.output_dir / VERDICT_NAME
    write_json(file, {"path": params.checkpoint, **verdict.to_dict()})
    context.events.write(
        "verdict", path=params.checkpoint, verdict=verdict.verdict, findings=findings, seconds=round(seconds, 3)
    )
    if not verdict.usable:
        raise InvalidCheckpoint(f"{params.checkpoint} is {verdict.verdict}: {verdict.errors()}")
    return StageResult({"verdict": verdict.verdict, "findings": len(verdict.findings)}, {"verdict": str(file)})
