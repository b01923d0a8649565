"""validate: a verdict on one checkpoint. An invalid one ends the job failed, with the verdict on record."""

import time
from pathlib import Path

from eagle3_core.checkpoint.findings import Verdict
from eagle3_core.checkpoint.judge import judge
from eagle3_core.contract.jobdir import write_json
from eagle3_core.contract.params import ValidateParams
from eagle3_core.deep import judge_deep
from eagle3_core.errors import InvalidCheckpoint
from worker.context import StageContext, StageResult
from worker.judge import judging_thread

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
    with judging_thread() as judging:
        verdict = judging.submit(_judge, params).result()
    seconds = time.monotonic() - started
    told = verdict.to_dict()
    for finding in verdict.findings:
        where = ": ".join(part for part in (finding.file, finding.tensor) if part)
        print(f"{finding.severity} [{finding.code}] {where}: {finding.message}", flush=True)
    print(f"verdict: {verdict.verdict} in {seconds:.2f} s", flush=True)
    file = context.output_dir / VERDICT_NAME
    write_json(file, {"path": params.checkpoint, **told})
    context.events.write("verdict", path=params.checkpoint, **told, seconds=round(seconds, 3))
    if not verdict.usable:
        raise InvalidCheckpoint(f"{params.checkpoint} is {verdict.verdict}: {verdict.errors()}")
    servers = {server.server: server.outcome for server in verdict.servers}
    data = {"verdict": verdict.verdict, "level": verdict.level, "findings": len(verdict.findings), "servers": servers}
    return StageResult(data, {"verdict": str(file)})


def _judge(params: ValidateParams) -> Verdict:
    previous, verifier, store = (
        None if path is None else Path(path) for path in (params.previous, params.verifier, params.data_dir)
    )
    if params.level == "deep":
        assert verifier is not None and store is not None, "the parameters were checked"
        return judge_deep(
            Path(params.checkpoint),
            verifier=verifier,
            store=store,
            previous=previous,
            max_mb_per_s=params.max_mb_per_s,
        )
    return judge(
        Path(params.checkpoint),
        level=params.level,
        previous=previous,
        verifier=verifier,
        max_mb_per_s=params.max_mb_per_s,
    )
