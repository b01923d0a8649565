"""The daemon's side of the collector: keeps one running, reads its lines, and ends one that has gone silent.

    started --line--> heard --no line within its interval + DEADLINE_S, or it ended--> killed, another when it is due
                        `-----lines that say NVML is silent--> kept for the host's sake until another is due

The pause before another one doubles up to a minute, until one is well. One that does not even die of SIGKILL (it hangs
in the kernel) is left behind and counted; beside it one further is started, never more.
"""

import logging
import os
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence

from server.system import clock

logger = logging.getLogger(__name__)

FIRST_INTERVAL_S = 10.0
DEADLINE_S = 5.0
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
DEATH_S = 2.0
MAX_LINE_BYTES = 4 << 20
TURN_S = 1.0


class Watcher:
    """One thread that has the collector's lines handed on."""

    def __init__(self, command: Sequence[str], on_line: Callable[[bytes], bool]) -> None:
        """Prepare.

        Args:
            command: starts a collector.
            on_line: takes a line; False when by its word the collector had better be replaced.
        """
        self._command = list(command)
        self._on_line = on_line
        self._interval_s = FIRST_INTERVAL_S
        self._stopping = threading.Event()
        self._woken, self._wake = os.pipe()
        self._thread = threading.Thread(target=self._run, name="watcher")
        self._process: subprocess.Popen[bytes] | None = None
        self._unread = b""
        self._heard_at = 0.0
        self._due = 0.0
        self._pause_s = FIRST_PAUSE_S
        self._left: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End the collector and the thread."""
        self._stopping.set()
        os.write(self._wake, b"x")
        self._thread.join()
        os.close(self._woken)
        os.close(self._wake)

    def look_every(self, seconds: float) -> None:
        """Change the pace; a change has a look taken at once."""
        if seconds != self._interval_s:
            self._interval_s = seconds
            os.write(self._wake, b"i")

    def look_now(self) -> None:
        """Have a look taken."""
        os.write(self._wake, b"i")

    @property
    def left_behind(self) -> int:
        """Collectors that were killed and have not died."""
        return sum(process.poll() is None for process in self._left)

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                try:
                    self._turn()
                except OSError:  # jobs wait for what is seen of GPUs: one bad moment must not end the looking
                    logger.exception("a look after the collector failed; it goes on")
                    self._stopping.wait(TURN_S)
        finally:
            self._end()

    def _turn(self) -> None:
        """Start one when it is due; read what is there; judge silence."""
        if self._process is None and clock.boottime() >= self._due and self.left_behind <= 1:
            self._start()
        poll = select.poll()
        poll.register(self._woken, select.POLLIN)
        output = None
        if self._process is not None:
            assert self._process.stdout is not None
            output = self._process.stdout.fileno()
            poll.register(output, select.POLLIN)
        ready = [descriptor for descriptor, _ in poll.poll(TURN_S * 1000)]
        if self._woken in ready:
            os.read(self._woken, 4096)
            self._tell_interval()
        if output is None:
            return
        if output in ready and not self._read(output):
            self._replace("it ended")
        elif clock.boottime() - self._heard_at > self._interval_s + DEADLINE_S:
            self._replace(f"no line for {clock.boottime() - self._heard_at:.0f} s")

    def _start(self) -> None:
        self._due = clock.boottime() + self._pause_s
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C at the daemon's terminal is not meant for it
            )
        except OSError as error:
            logger.error("the collector of GPU and host metrics cannot be started: %s", error)
            self._back_off()
            return
        self._unread, self._heard_at = b"", clock.boottime()
        self._tell_interval()

    def _tell_interval(self) -> None:
        if self._process is None:
            return
        assert self._process.stdin is not None
        try:
            os.write(self._process.stdin.fileno(), f"{self._interval_s}\n".encode())
        except BrokenPipeError:
            return  # its end is seen by reading

    def _read(self, descriptor: int) -> bool:
        """Hand its lines on; False when there will be no more."""
        data = os.read(descriptor, 1 << 16)
        self._unread += data
        *lines, self._unread = self._unread.split(b"\n")
        for line in lines:
            self._heard_at = clock.boottime()
            if self._on_line(line):
                self._pause_s, self._due = FIRST_PAUSE_S, clock.boottime() + FIRST_PAUSE_S
            elif clock.boottime() >= self._due and self.left_behind == 0:
                self._replace("NVML does not answer it")
                return True
        return bool(data) and len(self._unread) < MAX_LINE_BYTES

    def _replace(self, why: str) -> None:
        logger.warning("the collector of GPU and host metrics is replaced: %s", why)
        self._end()
        self._back_off()

    def _back_off(self) -> None:
        """Another one now if its time has come already, and the next no sooner than after a longer pause."""
        self._pause_s = min(self._pause_s * 2, LONGEST_PAUSE_S)

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        process.kill()
        process.stdout.close()
        process.stdin.close()
        self._left = [*(one for one in self._left if one.poll() is None), process]
        if not _dies(process, DEATH_S):
            logger.error("collector %d does not die of SIGKILL; it is left behind", process.pid)


def _dies(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Whether a killed process ends in time, whatever the clock does meanwhile; it is reaped then."""
    if process.poll() is not None:
        return True
    descriptor = os.pidfd_open(process.pid)
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(seconds * 1000)) and process.poll() is not None
    finally:
        os.close(descriptor)


def collector_command(paths: Sequence[str]) -> list[str]:
    """Starts a collector that reports the free space at these paths."""
    return [sys.executable, "-P", "-m", "server.system.collector", str(FIRST_INTERVAL_S), *paths]
