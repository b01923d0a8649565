"""What `eyas job` prints."""

from typing import Any

from client.views import JobView
from eagle3_core.contract.plain import plain


def job_text(job: JobView) -> str:
    """A job for a person: what it does, where it writes, what it found, its epochs, result and warnings."""
    lines = [f"{job['id']}  {job['name']} ({job['stage']})", job["summary"]]
    if job["hint"]:
        lines.append(f"hint: {job['hint']}")
    lines.append(f"output: {job['output_dir']}")
    last = job["last_checkpoint"]
    if last is not None and last["why"] is not None:
        lines.append(f"last checkpoint: {last['path']} {last['verdict']}: {last['why']}")
    lines += [f"{fact['title']}: {fact['text']}" for fact in job["setup"]]
    lines += [_epoch_line(done, job["epochs"]) for done in job["epochs_done"]]
    if job["result"] is not None:
        lines += [f"{name}: {value}" for name, value in job["result"]["data"].items() if _is_plain(value)]
    lines += [f"warning [{one['code']}] {one['message']} (x{one['count']})" for one in job["warnings"]]
    return plain("\n".join(lines))


def _epoch_line(done: dict[str, Any], epochs: int | None) -> str:
    """One epoch, counted from 1 as in the summary."""
    of = "" if epochs is None else f" of {epochs}"
    training = f"{_metrics(done['train'])} in {done['train_s']:.1f} s"
    validation = "none" if done["val"] is None else f"{_metrics(done['val'])} in {done['val_s']:.1f} s"
    return f"epoch {done['epoch'] + 1}{of}: training {training}; validation {validation}"


def _metrics(metrics: dict[str, Any]) -> str:
    loss, accuracy = metrics.get("loss"), metrics.get("accuracy")
    parts = [f"loss {loss:.4g}"] if isinstance(loss, int | float) else ["loss not finite"]
    if isinstance(accuracy, list):
        shares = ["-" if one is None else f"{100 * one:.1f}" for one in accuracy]
        parts.append(f"accuracy {', '.join(shares)} %")
    return ", ".join(parts)


def _is_plain(value: object) -> bool:
    """Whether a value of a result fits into a line; what is nested is in the answer as JSON."""
    return isinstance(value, str | int | float)
