"""The main job on a real verifier: prompts -> prepare -> extract -> train -> evaluate, over HTTP. Run by `make demo`.

    .demo/verifier              SmolLM2-135M-Instruct, kept between runs
    .demo/responses-*.jsonl     its answers to prompts_train.txt, kept between runs
    .demo/state                 the daemon's state directory
    .demo/run                   outputs of the latest run
    .demo/report.json           what came out

Budgets are steps and tokens, never seconds, so the outcome does not depend on how busy the machine is.
"""

import hashlib
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from sample import sample_responses
from verifier import fetch_verifier

from client.http import EyasClient, Unreachable
from client.views import ENDED, JobView

HERE = Path(__file__).resolve().parent
DEMO = HERE.parents[1] / ".demo"
VERIFIER, STATE, RUN, REPORT = DEMO / "verifier", DEMO / "state", DEMO / "run", DEMO / "report.json"
MAX_SEQ_LEN, ANSWER_TOKENS, SAMPLE_BATCH = 160, 128, 90
STAGES = ("prepare", "extract", "train", "evaluate")
POLL_S = 1.0

console = Console()


def main() -> int:
    """Run the demo; 0 when every stage succeeded."""
    DEMO.mkdir(exist_ok=True)
    console.print("[bold]verifier[/]: SmolLM2-135M-Instruct")
    fetch_verifier(VERIFIER)
    conversations, sample_s = responses()
    held_out = DEMO / "held_out.jsonl"
    write_prompts(held_out)
    shutil.rmtree(RUN, ignore_errors=True)
    with daemon() as client:
        console.print(f"[bold]status page[/]: {client.login_link()}")
        jobs = client.submit(chain(conversations, held_out))
        try:
            views = follow(client, [job["id"] for job in jobs])
        except BaseException:
            for job in jobs:
                client.cancel(job["id"])
            raise
        failed = [view for view in views if view["state"] != "succeeded"]
        for view in failed:
            console.print(f"[red]{view['name']}[/]: {view['summary']}")
        if failed:
            console.print(client.log(failed[0]["id"]).data[-3000:].decode(errors="replace"), markup=False)
            return 1
        write_report(client, views, sample_s)
    return 0


def responses() -> tuple[Path, float | None]:
    """The verifier's own answers, and the seconds it took to sample them; None when they were there already."""
    prompts = (HERE / "prompts_train.txt").read_text().splitlines()
    digest = hashlib.sha256(json.dumps([prompts, ANSWER_TOKENS]).encode()).hexdigest()[:12]
    path = DEMO / f"responses-{digest}.jsonl"
    if path.exists():
        console.print(f"[bold]responses[/]: {path.name} of an earlier run")
        return path, None
    console.print(f"[bold]responses[/]: sampling {len(prompts)} answers of up to {ANSWER_TOKENS} tokens")
    started = time.monotonic()
    sample_responses(VERIFIER, prompts, path, ANSWER_TOKENS, SAMPLE_BATCH)
    return path, time.monotonic() - started


def write_prompts(path: Path) -> None:
    """The held-out prompts as conversations without an answer."""
    prompts = (HERE / "prompts_held_out.txt").read_text().splitlines()
    path.write_text("".join(json.dumps({"messages": [{"role": "user", "content": p}]}) + "\n" for p in prompts))


def chain(conversations: Path, held_out: Path) -> dict[str, Any]:
    """The four jobs, each waiting for the one before."""
    verifier = str(VERIFIER)
    prepared, store, checkpoints = (str(RUN / name) for name in ("prepared", "store", "checkpoints"))
    epochs = 5
    return {
        "jobs": [
            {
                "name": "prepare",
                "stage": "prepare",
                "params": {
                    "verifier": verifier,
                    "conversations": str(conversations),
                    "output_dir": prepared,
                    "draft_vocab_size": 2048,
                    "max_seq_len": MAX_SEQ_LEN,
                },
            },
            {
                "name": "extract",
                "stage": "extract",
                "depends_on": ["prepare"],
                "params": {"verifier": verifier, "prepared_dir": prepared, "output_dir": store},
            },
            {
                "name": "train",
                "stage": "train",
                "depends_on": ["extract"],
                "params": {
                    "verifier": verifier,
                    "data_dir": store,
                    "vocab_map_dir": prepared,
                    "output_dir": checkpoints,
                    "epochs": epochs,
                    "lr": 1e-3,
                    "warmup_ratio": 0.05,
                    "max_seq_len": MAX_SEQ_LEN,
                    "ttt_steps": 3,
                    "val_ratio": 0.05,
                    # This small verifier's states differ in size by a factor of ten between layers.
                    "norm_before_fc": True,
                },
            },
            {
                "name": "evaluate",
                "stage": "evaluate",
                "depends_on": ["train"],
                "params": {
                    "verifier": verifier,
                    "checkpoint": f"{checkpoints}/{epochs - 1}",
                    "prompts": str(held_out),
                    "output_dir": str(RUN / "evaluation"),
                    "max_prompts": 12,
                    "max_new_tokens": 64,
                    "speculative_tokens": 3,
                },
            },
        ]
    }


@contextmanager
def daemon() -> Iterator[EyasClient]:
    """A daemon on a free loopback port, stopped at the end."""
    command = [sys.executable, "-P", "-m", "client.cli", "serve", "--state", str(STATE), "--port", "0"]
    (STATE / "daemon.json").unlink(missing_ok=True)  # left by a daemon that was killed
    log = (DEMO / "daemon.log").open("ab")
    process = subprocess.Popen([*command, "--root", str(DEMO)], stdout=log, stderr=subprocess.STDOUT)
    try:
        yield connect(process)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=30)
        log.close()


def connect(process: subprocess.Popen[bytes]) -> EyasClient:
    """A client of the daemon once it answers."""
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        try:
            client = EyasClient.of_state(STATE)
            client.health()
            return client
        except Unreachable:
            pass
        time.sleep(0.1)
    raise SystemExit(f"the daemon did not start; see {DEMO / 'daemon.log'}")


def follow(client: EyasClient, ids: list[str]) -> list[JobView]:
    """Show a bar for each job until all have ended."""
    columns = (TextColumn("{task.description:9}"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.fields[text]}"))
    with Progress(*columns, console=console) as progress:
        bars = [progress.add_task(stage, total=None, start=False, text="") for stage in STAGES]
        said = [""] * len(ids)
        while True:
            views = [client.job(job_id) for job_id in ids]
            for index, view in enumerate(views):
                said[index] = show(progress, bars[index], view, said[index])
            if all(view["state"] in ENDED for view in views):
                return views
            time.sleep(POLL_S)


def show(progress: Progress, bar: TaskID, view: JobView, said: str) -> str:
    """Bring one bar up to date; off a terminal, say each new phase and epoch in a line. Returns what was said."""
    if view["started_at"] is not None:
        progress.start_task(bar)
    if view["state"] == "succeeded":
        progress.update(bar, total=1, completed=1)
        progress.stop_task(bar)
    elif view["steps"]:
        progress.update(bar, total=view["steps"], completed=view["step"])
    progress.update(bar, text=view["summary"])
    key = f"{view['state']} {view['phase']} {view['epoch']}"
    if key != said and not console.is_terminal:
        console.print(f"{view['name']}: {view['summary']}", markup=False)
    return key


def write_report(client: EyasClient, views: list[JobView], sample_s: float | None) -> None:
    """Write report.json and print the table."""
    train, evaluate = views[2], views[3]
    assert evaluate["result"] is not None
    result = evaluate["result"]["data"]
    seconds = {view["stage"]: view["elapsed_s"] for view in views}
    report = {
        "seconds": seconds if sample_s is None else {"sample": round(sample_s, 1), **seconds},
        "epochs": len(train["epochs_done"]),
        "verdicts": [checkpoint["verdict"] for checkpoint in client.checkpoints(train["id"])],
        "steps": train["steps"],
        **result,
    }
    REPORT.write_text(json.dumps(report, indent=1) + "\n")
    table = Table(title="SmolLM2-135M-Instruct, EAGLE-3 drafter")
    table.add_column("what")
    table.add_column("value", justify="right")
    for stage, value in report["seconds"].items():
        table.add_row(f"{stage}, seconds", f"{value:.1f}")
    for epoch, done in enumerate(train["epochs_done"]):
        validation = done["val"]
        text = "no validation" if validation is None else f"validation loss {validation['loss']:.3f}"
        table.add_row(f"epoch {epoch}", f"{text}, checkpoint {report['verdicts'][epoch]}")
    table.add_row("acceptance length by walk", f"{result['tau_walk']:.3f}")
    table.add_row("acceptance length by decoding", f"{result['tau_decoding']:.3f}")
    table.add_row("texts identical", f"{result['prompts_identical']} of {result['prompts_decoded']}")
    console.print(table)
    console.print(f"report: {REPORT}")
    console.print("see the status page again: make serve STATE=.demo/state")


if __name__ == "__main__":
    sys.exit(main())
