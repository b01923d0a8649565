"""Programs that start at once: forked from a server that has imported the daemon, which takes a second of CPU time.

A fresh interpreter is what `make chaos` and its short form in the suite start, and every daemon with LD_PRELOAD.
"""

import importlib
import os
import runpy
import sys
import time
from multiprocessing import get_context
from multiprocessing.context import ForkServerProcess
from pathlib import Path

_context = get_context("forkserver")
_context.set_forkserver_preload(["client.cli", "server.app", "uvicorn.lifespan.on"])


def start(program: str, arguments: list[str], environment: dict[str, str], cwd: Path, log: Path) -> ForkServerProcess:
    """Start a program as `python -P PROGRAM ARGUMENTS` would, PROGRAM a file or `client.cli`, its output in the log."""
    process = _context.Process(target=_become, args=(program, arguments, environment, cwd, log), daemon=True)
    process.start()
    return process


def _become(program: str, arguments: list[str], environment: dict[str, str], cwd: Path, log: Path) -> None:
    os.chdir(cwd)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for standard in (1, 2):
        os.dup2(output, standard)
    os.close(output)
    if "LD_PRELOAD" in environment:  # heeded when a program is loaded
        what = [program] if program.endswith(".py") else ["-m", program]
        os.execve(sys.executable, [sys.executable, "-P", *what, *arguments], environment)
    os.environ.clear()
    os.environ.update(environment)
    time.tzset()
    sys.argv = [program, *arguments]
    if program.endswith(".py"):
        runpy.run_path(program, run_name="__main__")
    else:
        importlib.import_module(program).app()
