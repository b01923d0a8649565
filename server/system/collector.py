"""`python -P -m server.system.collector SECONDS PATH...`: one JSON line on stdout for each look at GPUs and host.

A process of its own, since a call of NVML may hang, in the kernel even. It holds no lock and keeps nothing on disk.

    stdin   lines with the seconds between looks; each has a look taken at once. Its end means that the daemon is gone
    stdout  {"boottime_s", "time", "host": {...}, "nvml": {...}}

NVML is asked by a thread: while that hangs, the host is still reported, and `nvml` tells for how long it has been
silent. Standard library, psutil and pynvml only, to stay small.
"""

import contextlib
import json
import os
import sys
import threading
import time
from typing import Any, NoReturn

from server.system import clock
from server.system.hostmetrics import HostReader
from server.system.nvml import NvmlReader

NVML_LIMIT_S = 2.0
"""What a reading may take before the line goes out without it; eight GPUs take some ten milliseconds."""

ANEW_S = 10.0
"""The least between two loads of the NVML library."""


class NvmlThread:
    """Asks NVML where waiting for ever does no harm."""

    def __init__(self) -> None:
        self._reader = NvmlReader()
        self._asked = threading.Event()
        self._answered = threading.Event()
        self._since: float | None = None
        self._reading: dict[str, Any] = {}
        threading.Thread(target=self._run, name="nvml", daemon=True).start()

    def read(self) -> dict[str, Any]:
        """The present state, or for how many seconds the question has been open."""
        if self._since is not None and self._answered.is_set():
            self._since = None  # answered long after it was asked: asked again
        if self._since is None:
            self._since = time.monotonic()
            self._answered.clear()
            self._asked.set()
        if self._answered.wait(NVML_LIMIT_S):
            self._since = None
            return {**self._reading, "silent_s": None}
        silent = round(time.monotonic() - self._since, 1)
        return {"driver": None, "gpus": [], "error": None, "absent": False, "stale_library": False, "silent_s": silent}

    def _run(self) -> None:
        while self._asked.wait():
            self._asked.clear()
            self._reading = self._reader.read()
            self._answered.set()


class Interval:
    """The seconds between looks, as the daemon wants them."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._changed = threading.Event()
        threading.Thread(target=self._listen, name="interval", daemon=True).start()

    def wait(self) -> None:
        """Until the next look is due, or asked for."""
        self._changed.wait(self.seconds)
        self._changed.clear()

    def _listen(self) -> None:
        while told := os.read(sys.stdin.fileno(), 4096):
            with contextlib.suppress(ValueError, IndexError):
                self.seconds = float(told.split()[-1])
            self._changed.set()
        os._exit(0)  # whatever the other threads are waiting for


def main(seconds: float, paths: list[str]) -> NoReturn:
    """Report until the daemon is gone."""
    interval, nvml, host = Interval(seconds), NvmlThread(), HostReader(paths)
    started = time.monotonic()
    while True:
        begun, time_begun = clock.boottime(), clock.utc_now()
        reading = nvml.read()
        sample = {
            "boottime_s": begun,
            "time": time_begun.isoformat(timespec="milliseconds"),
            "nvml": reading,
            "host": host.read(),
        }
        try:
            os.write(sys.stdout.fileno(), json.dumps(sample).encode() + b"\n")
        except BrokenPipeError:
            os._exit(0)
        if reading["stale_library"] and time.monotonic() - started > ANEW_S:
            # The loader keeps the library it has. stdin and stdout, and with them the daemon's view of us, stay.
            again = ["-P", "-m", "server.system.collector", str(interval.seconds), *paths]
            os.execv(sys.executable, [sys.executable, *again])  # noqa: S606
        interval.wait()


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2:])
