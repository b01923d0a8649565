"""What is new in a job, by kind, so that whoever waits is answered when there is something to say.

progress    anything that is shown, save that time passes: step, loss, and all of the following
change      state, health, phase, attempt, what was asked of it, what it waits for, warnings, result, and the next two
epoch       an epoch has ended, or another one began
checkpoint  one was written, or judged
"""

from dataclasses import dataclass

from server.domain.job import Job


@dataclass(frozen=True)
class News:
    """Which kinds of news there are between two views of a job."""

    progress: bool
    change: bool
    epoch: bool
    checkpoint: bool


def news_of(old: Job, new: Job) -> News:
    """What is new in `new`."""
    before, after = old.status, new.status
    epoch = before.epochs_done != after.epochs_done or _left_unfinished(old, new)
    checkpoint = before.last_checkpoint != after.last_checkpoint
    change = (
        epoch
        or checkpoint
        or (old.state, old.health, old.reason, old.attempt is None)
        != (new.state, new.health, new.reason, new.attempt is None)
        or (old.cancel_asked_at, old.pause_asked_at) != (new.cancel_asked_at, new.pause_asked_at)
        or (old.attempt is not None and new.attempt is not None and old.attempt.number != new.attempt.number)
        or without_digits(old.waiting) != without_digits(new.waiting)
        or before.phase != after.phase
        or before.epoch != after.epoch
        or before.result != after.result
        or _warned(old) != _warned(new)
    )
    seen = ("step", "steps", "epochs", "loss", "accuracy", "lr", "tokens_per_s", "setup")
    progress = change or any(vars(before)[name] != vars(after)[name] for name in seen)
    return News(progress=progress, change=change, epoch=epoch, checkpoint=checkpoint)


def _left_unfinished(old: Job, new: Job) -> bool:
    """Another epoch began without a word that the last one has ended, as with foreign programs."""
    last = old.status.epoch
    told = any(done.epoch == last for done in old.status.epochs_done)
    return last is not None and not told and new.status.epoch not in (None, last)


def _warned(job: Job) -> tuple[int, bool]:
    """Counts of warnings that come again and again are no news."""
    return len(job.status.warnings), job.status.warnings_left_out > 0


def without_digits(text: str | None) -> str:
    """A reason to wait without its sizes and seconds, which change all the time."""
    return "".join(sign for sign in text or "" if not sign.isdigit())
