"""Coroutines that wait for jobs to change. Each costs an event and its place in a set: no thread, no polling.

the loop, a request  --Snapshots.put--> tell(job) --call_soon_threadsafe--> the bells of those who wait for that job
"""

import asyncio
from collections.abc import Collection, Iterator
from contextlib import contextmanager

ANY = "*"
"""In place of a job's id, which cannot hold it: every job."""


class Waiters:
    """Bells by job. `tell` may be called from any thread, all else belongs to the event loop."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._bells: dict[str, set[asyncio.Event]] = {}
        self.closing = False
        """The daemon is being stopped: nobody waits any longer."""

    @property
    def any(self) -> bool:
        """Whether anybody waits. May be asked from any thread."""
        return bool(self._bells)

    def open(self) -> None:
        """Begin, on the running event loop."""
        self._loop = asyncio.get_running_loop()

    def close(self) -> None:
        """Wake everybody; whoever comes later does not wait."""
        self.closing = True
        for bells in self._bells.values():
            for bell in bells:
                bell.set()

    @contextmanager
    def bell(self, jobs: Collection[str]) -> Iterator[asyncio.Event]:
        """An event that is set whenever one of these jobs has changed, and when the daemon is being stopped.

        Clear it, then look, then wait: whatever changes after the look sets it again.
        """
        bell = asyncio.Event()
        for job_id in jobs:
            self._bells.setdefault(job_id, set()).add(bell)
        try:
            yield bell
        finally:
            for job_id in jobs:
                self._bells[job_id].discard(bell)
                if not self._bells[job_id]:
                    del self._bells[job_id]

    def tell(self, job_id: str) -> None:
        """A job has changed. Whoever looks from now on sees it."""
        if self._loop is not None and (job_id in self._bells or ANY in self._bells):
            self._loop.call_soon_threadsafe(self._ring, job_id)

    def _ring(self, job_id: str) -> None:
        for key in (job_id, ANY):
            for bell in self._bells.get(key, ()):
                bell.set()


async def rung(bell: asyncio.Event, seconds: float) -> None:
    """Wait for a bell, so long at most."""
    try:
        async with asyncio.timeout(seconds):
            await bell.wait()
    except TimeoutError:
        return
