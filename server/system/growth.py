"""Being told by the kernel that a file has grown, while somebody follows it.

A watch is good for one change, and is taken again before the next look: a job that prints a thousand lines while its
last one is being sent wakes nobody. Nothing is watched, and inotify is not even opened, while nobody follows.
"""

import asyncio
import logging
import threading
from typing import BinaryIO

from inotify_simple import INotify, flags

logger = logging.getLogger(__name__)

_ONCE = flags.MODIFY | flags.ONESHOT


class Growth:
    """Rings bells on the event loop when files change. `watch` and `forget` may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inotify: INotify | None = None
        self._bells: dict[int, set[asyncio.Event]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self.blind = False
        """Nothing can be watched here: whoever follows has to look by himself."""

    def open(self) -> None:
        """Begin, on the running event loop."""
        self._loop = asyncio.get_running_loop()

    def close(self) -> None:
        """Watch nothing any more; on the event loop."""
        with self._lock:
            if self._inotify is not None and self._loop is not None:
                self._loop.remove_reader(self._inotify.fileno())
                self._inotify.close()
            self._inotify, self._loop = None, None
            self._bells.clear()

    def watch(self, file: BinaryIO, bell: asyncio.Event) -> bool:
        """Have the bell rung at the next change of an open file; False when nobody can tell."""
        with self._lock:
            if self._loop is None or self.blind:
                return False
            try:
                if self._inotify is None:
                    self._inotify = INotify()
                    self._loop.call_soon_threadsafe(self._loop.add_reader, self._inotify.fileno(), self._read)
                # By its descriptor, so that it is the very file that was opened.
                number = self._inotify.add_watch(f"/proc/self/fd/{file.fileno()}", _ONCE)
            except OSError as error:
                logger.warning("logs cannot be watched (%s); looking at them again and again instead", error.strerror)
                self.blind = True
                return False
            self._bells.setdefault(number, set()).add(bell)
            return True

    def forget(self, bell: asyncio.Event) -> None:
        """Whoever waited with this bell has gone."""
        with self._lock:
            for number in [number for number, bells in self._bells.items() if bell in bells]:
                self._bells[number].discard(bell)
                if not self._bells[number]:
                    self._remove(number)

    def _remove(self, number: int) -> None:
        del self._bells[number]
        if self._inotify is not None:
            try:
                self._inotify.rm_watch(number)
            except OSError:
                return  # it has just been used up

    def _read(self) -> None:
        with self._lock:
            if self._inotify is None:
                return
            for number, mask, _, _ in self._inotify.read(timeout=0):
                found = list(self._bells) if mask & flags.Q_OVERFLOW else [number]
                for one in found:
                    for bell in self._bells.pop(one, ()):
                        bell.set()
