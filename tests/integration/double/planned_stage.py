"""A stage that does what `plan.json` in its checkpoint directory says, one [word, argument] after the other."""

import errno
import functools
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from eagle3_core.contract.jobdir import is_full
from eagle3_core.errors import BadData, BadInput
from worker.context import StageContext, StageResult

SLEEPER = [sys.executable, "-c", "import signal; signal.pause()"]
ERRORS = {
    "memory": MemoryError("out of host memory"),
    "disk": OSError(errno.ENOSPC, "No space left on device"),
    "import": ImportError("No module named 'flash_attn'"),
    "data": BadData("row 7 of shard 3 is damaged"),
    "bug": KeyError("layers"),
}


def run(context: StageContext) -> StageResult:
    directory = Path(dict(context.params)["checkpoint"])
    for word, argument in json.loads((directory / "plan.json").read_text()):
        WORDS[word](context, argument)
    return StageResult({"plan": "done"}, {"place": str(context.output_dir)})


def _print(_: StageContext, text: str) -> None:
    sys.stdout.write(text + "\n")


def _event(context: StageContext, fields: dict[str, Any]) -> None:
    fields = dict(fields)
    context.events.write(fields.pop("type"), **fields)


def _nan(context: StageContext, _: None) -> None:
    context.events.write("progress", step=1, steps=2, epoch=0, epochs=1, loss=float("nan"), accuracy=[float("inf")])


def _raw(context: StageContext, text: str) -> None:
    """A line no EventWriter would write."""
    with _events_file(context).open("ab") as file:
        file.write(text.encode() + b"\n")


def _events_file(context: StageContext) -> Path:
    return Path(sys.argv[1]) / "events.jsonl"


def _stream(context: StageContext, name: str) -> None:
    """Events and log lines, a hundred a second, until a file appears."""
    step = 0
    while not Path(name).exists():
        step += 1
        context.events.write("progress", step=step, steps=100_000, epoch=0, epochs=1, loss=1.0 / step)
        sys.stdout.write(f"line {step}\n")
        context.check_stop()
        context.stop_requested.wait(0.01)


def _on_attempt(context: StageContext, when: list[Any]) -> None:
    """[n, word, argument]: do that only in the nth process life."""
    number, word, argument = when
    if int(Path(sys.argv[1]).name) == number:
        WORDS[word](context, argument)


def _vanish(_: StageContext, __: None) -> None:
    """Shim and stage are gone at once."""
    os.kill(os.getppid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _until_stopped_saving(context: StageContext, _: None) -> None:
    """As a training does: save unless the work is not wanted."""
    context.stop_requested.wait()
    (context.output_dir / "saved").write_text(str(context.save_when_stopped()))
    context.check_stop()


def _deaf_until_file(context: StageContext, name: str) -> None:
    """Asked to stop, it stops only once a file appears."""
    context.stop_requested.wait()
    _finish_at_file(context, name)
    context.check_stop()


def _finish_at_file(_: StageContext, name: str) -> None:
    """Goes on when a file appears, asked to stop or not."""
    pause = threading.Event()
    while not Path(name).exists():
        pause.wait(0.01)


class _Last:
    """Sends SIGTERM when the interpreter takes the modules apart, which is after it has reset the handlers."""

    def __init__(self) -> None:
        self._end = functools.partial(os.kill, os.getpid(), signal.SIGTERM)

    def __del__(self) -> None:
        self._end()


KEPT: list[object] = []


def _stopped_at_exit(_: StageContext, __: None) -> None:
    KEPT.append(_Last())


def _pulse(context: StageContext, seconds: float) -> None:
    """Progress at a steady pace until it is stopped."""
    step = 0
    while not context.stop_requested.wait(seconds):
        step += 1
        context.events.write("progress", step=step, steps=100_000, epoch=0, epochs=1, loss=1.0 / step)
    context.check_stop()


def _until_stopped(context: StageContext, _: None) -> None:
    context.stop_requested.wait()
    context.check_stop()


def _deaf(_: StageContext, __: None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _forever(_: StageContext, __: None) -> None:
    while True:
        signal.pause()


def _until_file(context: StageContext, name: str) -> None:
    while not Path(name).exists():
        context.check_stop()
        context.stop_requested.wait(0.01)


def _child(context: StageContext, options: dict[str, bool]) -> None:
    """Leave a process of another session behind; without the mark when told so."""
    environment = {} if options.get("unmarked") else dict(os.environ)
    child = subprocess.Popen(SLEEPER, start_new_session=True, env=environment)
    (context.output_dir / "child").write_text(str(child.pid))


def _grab(_: StageContext, megabytes: int) -> None:
    held = [os.urandom(1 << 20) for _ in range(megabytes)]
    sys.stdout.write(f"holds {len(held)} MB\n")


class Deadlocked:
    """A dataset whose rows never come."""

    def __init__(self, reached: str) -> None:
        self._reached = reached

    def __len__(self) -> int:
        return 4

    def __getitem__(self, _: int) -> int:
        lock = threading.Lock()
        lock.acquire()
        Path(self._reached).touch()
        return lock.acquire()  # here it stands


def _touch(_: StageContext, name: str) -> None:
    Path(name).touch()


def _save_until_file(context: StageContext, name: str) -> None:
    """Saves checkpoints one after the other, as a training does, until a file appears; a full disk is outlasted here.

    After each try the latest one that can be gone on from is the last that was saved.
    """
    from eagle3_core.checkpoint.write import clear_leftovers, set_aside  # noqa: PLC0415 - takes seconds
    from eagle3_core.training.resume import checkpoints, find_latest  # noqa: PLC0415
    from tests import makers  # noqa: PLC0415

    saved = failed = 0
    while not Path(name).exists():
        try:
            makers.write_drafter(context.output_dir, saved, steps=saved + 1, extra={"position": {}})
        except OSError as error:
            if not is_full(error):
                raise
            failed += 1
            context.stop_requested.wait(0.02)
        else:
            saved += 1
            for _, path, _ in checkpoints(context.output_dir)[2:]:
                set_aside(path)
            clear_leftovers(context.output_dir)
        latest, _ = find_latest(context.output_dir)
        assert (None if latest is None else latest.step) == (saved or None)
    context.report("saves", "", saved=saved, failed=failed)


def _deadlocked_loader(context: StageContext, method: str) -> None:
    from torch.utils.data import DataLoader  # noqa: PLC0415 - takes seconds

    reached = str(context.output_dir / "reached")
    loader: Any = DataLoader(Deadlocked(reached), num_workers=1, multiprocessing_context=method)  # type: ignore[arg-type]
    rows = iter(loader)
    _finish_at_file(context, reached)
    context.phase("training")
    next(rows)


def _raise(_: StageContext, which: str) -> None:
    raise ERRORS[which]


def _fail(_: StageContext, cause: str) -> None:
    raise BadInput(cause)


def _kill(_: StageContext, number: int) -> None:
    os.kill(os.getpid(), number)
    signal.pause()


def _exit(_: StageContext, code: int) -> None:
    os._exit(code)


WORDS: dict[str, Any] = {
    "print": _print,
    "event": _event,
    "nan": _nan,
    "raw": _raw,
    "stream": _stream,
    "pulse": _pulse,
    "stopped_at_exit": _stopped_at_exit,
    "until_stopped": _until_stopped,
    "touch": _touch,
    "save_until_file": _save_until_file,
    "until_stopped_saving": _until_stopped_saving,
    "on_attempt": _on_attempt,
    "vanish": _vanish,
    "deaf_until_file": _deaf_until_file,
    "finish_at_file": _finish_at_file,
    "deaf": _deaf,
    "forever": _forever,
    "until_file": _until_file,
    "child": _child,
    "raise": _raise,
    "fail": _fail,
    "deadlocked_loader": _deadlocked_loader,
    "grab": _grab,
    "kill": _kill,
    "exit": _exit,
}
