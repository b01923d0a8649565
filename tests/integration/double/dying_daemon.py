"""`eyas serve` that kills itself at one point of a job's way: python -P dying_daemon.py POINT serve ..."""

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from client.cli import app
from server.db.queries import jobs as job_queries
from server.domain.states import FINAL_JOB
from server.services import reconciler
from server.services.reconciler import Reconciler


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def around(owner: Any, name: str, before: Callable[..., bool] | None, after: Callable[..., bool] | None) -> None:
    """Have a call end the process, before or after its work, where the condition holds."""
    real = getattr(owner, name)

    def call(*arguments: Any, **named: Any) -> Any:
        if before is not None and before(*arguments, **named):
            die()
        value = real(*arguments, **named)
        if after is not None and after(*arguments, **named):
            die()
        return value

    setattr(owner, name, call)


def always(*_arguments: Any, **_named: Any) -> bool:
    return True


def ends(_self: Any, _old: Any, new: Any, *_rest: Any) -> bool:
    return new.state in FINAL_JOB


POINTS: dict[str, Callable[[], None]] = {
    "before the attempt is stored": lambda: around(job_queries, "begin_attempt", always, None),
    "once the attempt is stored": lambda: around(Reconciler, "_spawn", always, None),
    "before the lock is taken": lambda: around(reconciler.locks, "take", always, None),
    "with the lock held": lambda: around(reconciler.process, "spawn", always, None),
    "once the shim is started": lambda: around(reconciler.process, "spawn", None, always),
    "once the launch is done": lambda: around(Reconciler, "_launch", None, always),
    "before the start is stored": lambda: around(Reconciler, "_apply", always, None),
    "before the end is stored": lambda: around(Reconciler, "_apply", ends, None),
    "once the end is stored": lambda: around(Reconciler, "_ended", always, None),
}

if __name__ == "__main__":
    point = sys.argv.pop(1)
    if point == "before the lock is taken":  # the daemon's own lock comes first
        real_launch = Reconciler._launch

        def launch(self: Any, job: Any, **named: Any) -> None:
            POINTS[point]()
            real_launch(self, job, **named)

        Reconciler._launch = launch  # type: ignore[method-assign]
    else:
        POINTS[point]()
    app()
