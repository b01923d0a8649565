"""What the services share: one object per daemon."""

import threading
from dataclasses import dataclass, field

from eagle3_core.contract.jobdir import JobDir
from server.db.engine import Database
from server.services.snapshots import Snapshots
from server.settings import Settings


@dataclass
class Runtime:
    """Settings, database, hot answers, the bell that wakes the loop, and whether an intent is what it woke for."""

    settings: Settings
    database: Database
    snapshots: Snapshots = field(default_factory=Snapshots)
    bell: threading.Event = field(default_factory=threading.Event)
    intent: threading.Event = field(default_factory=threading.Event)
    record_lock: threading.Lock = field(default_factory=threading.Lock)
    stack_lock: threading.Lock = field(default_factory=threading.Lock)

    def job_dir(self, job_id: str) -> JobDir:
        """The directory of a job; the id was checked before."""
        return JobDir(self.settings.jobs_dir / job_id)

    def wake(self) -> None:
        """Tell the loop that an intent was written."""
        self.intent.set()
        self.bell.set()
