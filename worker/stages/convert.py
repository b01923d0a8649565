"""convert: a checkpoint of any format as one that a server reads, judged once it is written."""

import shutil
import time
from pathlib import Path

from eagle3_core.checkpoint.convert import Conversion, convert
from eagle3_core.contract.params import ConvertParams
from worker.context import StageContext, StageResult
from worker.judge import judging_thread


def run(context: StageContext) -> StageResult:
    """Convert into `<output_dir>/<to>`, and report the verdict and what each server will do with it.

    Raises:
        CheckpointError: the checkpoint is damaged or unclear, or the format cannot express it.
        OSError: the disk is full or the like.
    """
    params = context.params
    assert isinstance(params, ConvertParams)
    context.phase("converting")
    started = time.monotonic()
    destination = context.output_dir / params.to
    if destination.exists():  # the directory is this job's own: an earlier attempt got that far, and no further
        shutil.rmtree(destination)
    with judging_thread() as thread:
        done = thread.submit(_convert, context, params, destination).result()
    seconds = time.monotonic() - started
    for note in done.notes:
        context.report("note", note)
    for finding in done.verdict.findings:
        print(f"{finding.severity} [{finding.code}] {finding.message}", flush=True)
    servers = {server.server: server.outcome for server in done.verdict.servers}
    print(f"verdict: {done.verdict.verdict} in {seconds:.2f} s; {servers}", flush=True)
    context.events.write("verdict", path=str(destination), **done.verdict.to_dict(), seconds=round(seconds, 3))
    data = {"verdict": done.verdict.verdict, "from": done.source_format, "to": done.target, "servers": servers}
    return StageResult(data | {"notes": list(done.notes)}, {"checkpoint": str(destination)})


def _convert(context: StageContext, params: ConvertParams, destination: Path) -> Conversion:
    return convert(
        Path(params.checkpoint),
        destination,
        params.to,
        verifier=None if params.verifier is None else Path(params.verifier),
        verifier_name=params.verifier_name,
        aux_layer_ids=params.aux_layer_ids,
        max_mb_per_s=params.max_mb_per_s,
        check_stop=context.check_stop,
    )
