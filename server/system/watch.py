"""Being told by the kernel that a job's files have changed, instead of looking again and again.

attempts/<n>/             files that appear (process.json, exit.json, events.jsonl) and descriptors that are closed,
                          which the end of the last process does
attempts/<n>/events.jsonl lines that are appended; the log beside it may grow as fast as it likes without a word
"""

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from inotify_simple import INotify, flags

logger = logging.getLogger(__name__)

_IN_DIRECTORY = flags.CREATE | flags.MOVED_TO | flags.CLOSE_WRITE
_READ_MS = 1000


class Watch:
    """Watches directories by key. Safe to use from any thread."""

    def __init__(self, wake: Callable[[bool], None], grows: str) -> None:
        """`grows` names the file in each directory that is appended to.

        `wake` is called when something has changed, with False when nothing but growth has.
        """
        self._wake = wake
        self._grows = grows
        self._lock = threading.Lock()
        self._directories: dict[int, tuple[str, Path]] = {}
        self._files: dict[int, str] = {}
        self._changed: set[str] = set()
        self._grown: set[str] = set()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self.blind = False
        """Something could not be watched, or changes were missed: whoever relies on it has to look by himself."""
        try:
            self._inotify = INotify()
        except OSError as error:
            self._give_up(error)
            return
        self._thread = threading.Thread(target=self._read, name="watch", daemon=True)
        self._thread.start()

    def add(self, key: str, directory: Path) -> None:
        """Watch a directory that exists; what happened before counts as a change."""
        with self._lock:
            try:
                self._directories[self._inotify.add_watch(directory, _IN_DIRECTORY)] = (key, directory)
                self._watch_file(key, directory)
            except OSError as error:
                self._give_up(error)
            self._changed.add(key)

    def _watch_file(self, key: str, directory: Path) -> None:
        try:
            self._files[self._inotify.add_watch(directory / self._grows, flags.MODIFY)] = key
        except FileNotFoundError:
            return

    def remove(self, key: str) -> None:
        """Watch the directories of this key no longer."""
        with self._lock:
            gone = [number for number, (whose, _) in self._directories.items() if whose == key]
            gone += [number for number, whose in self._files.items() if whose == key]
            for number in gone:
                self._directories.pop(number, None)
                self._files.pop(number, None)
                try:
                    self._inotify.rm_watch(number)
                except OSError:
                    continue  # the file was removed, and the watch with it
            self._changed.discard(key)
            self._grown.discard(key)

    def changed(self) -> tuple[set[str], set[str]]:
        """Keys in whose directories something else has happened since the last call, and those whose file has grown."""
        with self._lock:
            found = self._changed, self._grown
            self._changed, self._grown = set(), set()
        return found

    def close(self) -> None:
        """Stop watching."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
            self._inotify.close()

    def _read(self) -> None:
        while not self._closing.is_set():
            events = self._inotify.read(timeout=_READ_MS)
            with self._lock:
                for number, mask, _, name in events:
                    self._note(number, mask, name)
                changed, grown = bool(self._changed), bool(self._grown)
            if events and (changed or grown):
                self._wake(changed)

    def _note(self, number: int, mask: int, name: str) -> None:
        if mask & flags.Q_OVERFLOW:
            self._changed.update(self._files.values(), (key for key, _ in self._directories.values()))
        elif number in self._files:
            self._grown.add(self._files[number])
        elif number in self._directories:
            key, directory = self._directories[number]
            self._changed.add(key)
            if name == self._grows and mask & (flags.CREATE | flags.MOVED_TO):
                self._watch_file(key, directory)

    def _give_up(self, error: OSError) -> None:
        if not self.blind:
            logger.warning("files cannot be watched (%s); looking at them again and again instead", error.strerror)
        self.blind = True
