"""CPU, memory, disks and network of this host. Runs in the collector's process only."""

import os
import shutil
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil

DISK_LIMIT_S = 0.5
"""A file system that has not answered by then is reported as silent; a dead network mount never answers."""


TOO_SOON_S = 0.2
"""Rates over less than this say nothing: the reading before is given again."""


class DiskSpace:
    """Free space of one path, asked by a thread of its own, which a dead mount may keep for ever."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._asked = threading.Event()
        self._answered = threading.Event()
        self._space: tuple[int, int, int] | None = None
        self._error: str | None = None
        self._since: float | None = None
        threading.Thread(target=self._run, name=f"disk {path}", daemon=True).start()

    def ask(self) -> None:
        """Have it looked up, unless an earlier question is still open."""
        if self._since is None or self._answered.is_set():
            self._since = time.monotonic()
            self._answered.clear()
            self._asked.set()

    def answer(self) -> dict[str, Any]:
        """{"path", "total", "used", "free", "reason"}, sizes in bytes."""
        found: dict[str, Any] = {"path": self.path, "total": None, "used": None, "free": None, "reason": None}
        assert self._since is not None
        open_for = time.monotonic() - self._since
        if not self._answered.wait(max(0.0, DISK_LIMIT_S - open_for)):
            found["reason"] = f"the file system has not answered for {time.monotonic() - self._since:.0f} s"
            return found
        if self._space is None:
            found["reason"] = self._error
        else:
            found["total"], found["used"], found["free"] = self._space
        return found

    def _run(self) -> None:
        while self._asked.wait():
            self._asked.clear()
            try:
                self._space, self._error = shutil.disk_usage(self.path), None
            except OSError as error:
                self._space, self._error = None, error.strerror or str(error)
            self._answered.set()


class HostReader:
    """Reads the host; rates are those since the reading before, null at the first."""

    def __init__(self, paths: list[str]) -> None:
        self._disks = [DiskSpace(path) for path in paths]
        self._counters: dict[str, tuple[float, dict[str, int]]] = {}
        self._last: tuple[float, dict[str, Any]] | None = None
        psutil.cpu_percent()  # its first answer is without meaning

    def read(self) -> dict[str, Any]:
        """One reading; bytes, percent and bytes per second."""
        if self._last is not None and time.monotonic() - self._last[0] < TOO_SOON_S:
            return self._last[1]
        for disk in self._disks:
            disk.ask()
        host: dict[str, Any] = {"reasons": {}, "cpus": len(os.sched_getaffinity(0))}
        _field(host, ("cpu_percent",), lambda: (psutil.cpu_percent(),))
        _field(host, ("load_1", "load_5", "load_15"), os.getloadavg)
        _field(host, ("ram_total", "ram_used", "ram_available"), _ram)
        _field(host, ("swap_total", "swap_used"), _swap)
        _field(host, ("disk_read_bytes_s", "disk_write_bytes_s"), lambda: self._rates("disk", _disk_counters()))
        _field(host, ("net_receive_bytes_s", "net_send_bytes_s"), lambda: self._rates("net", _net_counters()))
        host["disks"] = [disk.answer() for disk in self._disks]
        self._last = (time.monotonic(), host)
        return host

    def _rates(self, kind: str, now: dict[str, int]) -> tuple[float, ...]:
        """Raises OSError at the first reading, for want of one before."""
        moment = time.monotonic()
        before = self._counters.get(kind)
        self._counters[kind] = (moment, now)
        if before is None:
            raise OSError("rates need two readings")
        seconds = max(moment - before[0], 1e-3)
        # A device that went takes its counters with it.
        return tuple(round(max(0, value - before[1].get(name, value)) / seconds, 1) for name, value in now.items())


def _field(host: dict[str, Any], names: tuple[str, ...], read: Callable[[], tuple[float, ...]]) -> None:
    try:
        host.update(zip(names, read(), strict=True))
    except (OSError, RuntimeError, NotImplementedError) as error:
        host.update(dict.fromkeys(names))
        host["reasons"].update(dict.fromkeys(names, str(error)))


def _ram() -> tuple[int, int, int]:
    memory = psutil.virtual_memory()
    return memory.total, memory.total - memory.available, memory.available


def _swap() -> tuple[int, int]:
    swap = psutil.swap_memory()
    return swap.total, swap.used


def _disk_counters() -> dict[str, int]:
    found = psutil.disk_io_counters()
    if found is None:
        raise OSError("the kernel shows no block devices")
    return {"read": found.read_bytes, "write": found.write_bytes}


def _net_counters() -> dict[str, int]:
    """All interfaces but the loopback."""
    found = [one for name, one in psutil.net_io_counters(pernic=True).items() if name != "lo"]
    return {"receive": sum(one.bytes_recv for one in found), "send": sum(one.bytes_sent for one in found)}
