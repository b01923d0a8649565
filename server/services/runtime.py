"""What the services share: one object per daemon."""

import threading
from dataclasses import dataclass, field

from eagle3_core.contract.jobdir import JobDir
from server.db.engine import Database
from server.db.queries import incarnation
from server.domain.redaction import Redactor
from server.services.background import BackgroundWriter
from server.services.hardware import Hardware
from server.services.snapshots import Snapshots
from server.services.space import Space
from server.services.waiters import Waiters
from server.settings import Settings
from server.system.growth import Growth


@dataclass
class Runtime:
    """Settings, database, what is secret, hot answers and who waits for them, writes that may wait, the bell that
    wakes the loop, whether it is urgent and whether it is an intent, what is known of GPUs and host, and which
    database this is.
    """

    settings: Settings
    database: Database
    redactor: Redactor = field(default_factory=Redactor)
    waiters: Waiters = field(default_factory=Waiters)
    growth: Growth = field(default_factory=Growth)
    snapshots: Snapshots = field(init=False)
    incarnation: str = field(init=False)
    background: BackgroundWriter = field(init=False)
    bell: threading.Event = field(default_factory=threading.Event)
    urgent: threading.Event = field(default_factory=threading.Event)
    intent: threading.Event = field(default_factory=threading.Event)
    record_lock: threading.Lock = field(default_factory=threading.Lock)
    stack_lock: threading.Lock = field(default_factory=threading.Lock)
    keys_in_flight: set[str] = field(default_factory=set)
    """Idempotency keys of the requests that are being carried out; `keys_lock` guards the check."""
    keys_lock: threading.Lock = field(default_factory=threading.Lock)
    unstored_cancels: dict[str, tuple[float, bool]] = field(default_factory=dict)
    """Id -> (grace in seconds, save first) of cancels that only a file holds, as the database could not be written."""
    space: Space = field(init=False)
    hardware: Hardware = field(init=False)

    def __post_init__(self) -> None:
        self.space = Space(self.settings)
        self.hardware = Hardware(self.settings, self.wake)
        self.snapshots = Snapshots(redactor=self.redactor, tell=self.waiters.tell)
        with self.database.read() as session:
            self.incarnation = incarnation.read(session)
        self.background = BackgroundWriter(self.database)

    def job_dir(self, job_id: str) -> JobDir:
        """The directory of a job; the id was checked before."""
        return JobDir(self.settings.jobs_dir / job_id)

    def wake(self) -> None:
        """Tell the loop that an intent was written."""
        self.intent.set()
        self.stir(urgent=True)

    def stir(self, urgent: bool) -> None:
        """Tell the loop that files have changed; what is not urgent may wait for more of its kind."""
        if urgent:
            self.urgent.set()
        self.bell.set()
