"""Rounds of jobs and mishaps. The witness outside counts, not the daemon.

each round: submit 2 or 3 jobs (answers get lost) - cancel - kill daemon, shim, stage - move the clock - fill the disk
            - have NVML fail
at the end: every job ended, nothing left, then each is settled (accounts.py)
"""

import json
import random
import shutil
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from eagle3_core.contract import proctree
from tests.chaos.accounts import FINAL, Faults, Order, settle
from tests.chaos.daemon import Clock, KilledDaemon, Worker, carriers, kill_worker, until, workers, zombies
from tests.chaos.gpus import ChaosGpus, chaos_gpus
from tests.disks import SmallDisk, cannot_mount

WITNESS = Path(__file__).with_name("witness.py")
KINDS = ("short", "long", "failing", "deaf", "forking")
JUMPS_S = (-30 * 86_400, -86_400, -3600, -61, 61, 3600, 86_400, 30 * 86_400)
MAX_RUNNING = 6
BACKLOG = 12
ENDED_WITHIN_S = 180.0
DISK_BYTES = 96 << 20
FULL = 507
NO_CARDS = "this host has none"
"""True to a daemon that starts while no driver is loaded: the fake cards are on no bus where it could see them."""


@dataclass
class Tally:
    """What was done."""

    rounds: int = 0
    shim_kills: int = 0
    stage_kills: int = 0
    clock_jumps: int = 0
    disk_full: int = 0
    nvml_failures: int = 0
    on_gpus: int = 0
    answers_lost: int = 0


class Chaos:
    """One run over one state directory."""

    def __init__(self, place: Path, seed: int, tempo: float) -> None:
        """`tempo`: longest of the long jobs in seconds."""
        self.place, self.tempo = place, tempo
        self.random = random.Random(seed)
        self.clock = Clock(place)
        (place / "witness").mkdir()
        self.disk = small_disk(place / "state")
        self.gpus: ChaosGpus | None = chaos_gpus(place)
        settings = {
            "EYAS_EXTERNAL_PROGRAMS": json.dumps([str(Path(sys.executable).resolve())]),
            "EYAS_MAX_RUNNING": str(MAX_RUNNING),
            "EYAS_DISK_LOW_GB": "0.004",
            "EYAS_DISK_RESERVE_MB": "4",
        }
        nvml = {} if self.gpus is None else self.gpus.environment
        self.daemon = KilledDaemon(place, {**settings, **self.clock.environment, **nvml})
        self.orders: dict[str, Order] = {}
        self.tally = Tally()
        self.faults = Faults()
        self._keyed: bool | None = None
        self._defunct: dict[tuple[int, int], float] = {}

    # Requests.

    def ask(self, method: str, path: str, **extra: Any) -> httpx.Response:
        """Ask until somebody answers. For requests that may be repeated."""
        while True:
            try:
                answer = self.daemon.ensure().request(method, path, **extra)
            except httpx.TransportError:
                continue
            if answer.status_code < 500:
                return answer
            self.faults.lock_errors.append(f"{method} {path}: {answer.status_code} {answer.text[:300]}")

    def submit(self, order: Order) -> None:
        """Have a job stored exactly once, whatever becomes of the answers.

        With the daemon's Idempotency-Key the same request is simply sent again; without it the job is looked up by its
        name first, and an answer is only dropped once it is there, for an unanswered request may still be at work.
        """
        if self._keyed is None:
            post = self.ask("GET", "/openapi.json").json()["paths"]["/jobs"]["post"]
            self._keyed = any(one["name"].lower() == "idempotency-key" for one in post.get("parameters", []))
        headers = {"Idempotency-Key": f"chaos-{order.name}"} if self._keyed else {}
        lose = self.random.random() < 0.3
        while True:
            wait = self.random.uniform(0.0005, 0.03) if lose and self._keyed else 30.0
            try:
                client = self.daemon.ensure()
                answer = client.post("/jobs", json=order.request, headers=headers, timeout=httpx.Timeout(30, read=wait))
            except httpx.TransportError:
                answer = None
            if answer is not None and answer.status_code == FULL:
                threading.Event().wait(0.05)  # until there is room
            elif answer is not None and answer.status_code == 422 and NO_CARDS in answer.text:
                threading.Event().wait(0.05)  # until the driver is loaded
            elif answer is not None and answer.status_code >= 500:
                self.faults.lock_errors.append(f"POST /jobs: {answer.status_code} {answer.text[:300]}")
            elif answer is not None and answer.status_code == 409 and self._keyed:
                threading.Event().wait(0.05)  # the first request with this key is still at work
            elif answer is not None and not lose:
                assert answer.status_code in (200, 201), answer.text
                order.id = answer.json()["jobs"][0]["id"]
                return
            self.tally.answers_lost += answer is None
            lose = False
            if not self._keyed and order.name in (there := self.by_name()):
                order.id = there[order.name][0]["id"]
                return

    def rows(self) -> list[dict[str, Any]]:
        """Every job the daemon knows, newest first."""
        return list(self.ask("GET", "/jobs?limit=1000").json()["jobs"])

    def by_name(self) -> dict[str, list[dict[str, Any]]]:
        """Name -> its jobs."""
        found: dict[str, list[dict[str, Any]]] = {}
        for row in self.rows():
            found.setdefault(row["name"], []).append(row)
        return found

    # One round.

    def round(self, number: int) -> None:
        """Submit, and let things go wrong."""
        self.tally.rounds += 1
        troubles = self.troubles(number)
        timer = self.daemon.kill_in(self.random.uniform(0, 0.8)) if self.due(self.daemon.kills, number) else None
        for _ in range(self.random.choice((2, 3, 3))):
            order = self.order()
            self.orders[order.name] = order
            self.submit(order)
            if self.random.random() < 0.2:
                self.cancel(self.random.choice([one for one in self.orders.values() if one.seen_final is None]))
        if self.clock.library is not None and self.due(self.tally.clock_jumps, number):
            self.clock.jump(self.random.choice(JUMPS_S))
            self.tally.clock_jumps += 1
        if self.due(self.tally.shim_kills, number):
            self.tally.shim_kills += self.kill("shim")
        if self.due(self.tally.stage_kills, number):
            self.tally.stage_kills += self.kill("stage")
        if timer is not None:
            timer.join()
            if self.random.random() < 0.3:
                self.daemon.kill_in(self.random.uniform(0, 1.0))  # while it starts and adopts
        self.look()
        for trouble in troubles:
            trouble.join()
        until(lambda: self.look() <= BACKLOG, "a shorter queue", ENDED_WITHIN_S, 0.1)
        self.clock.tidy()

    def troubles(self, number: int) -> list[threading.Thread]:
        """What goes wrong around the daemon for a while."""
        begun = []
        if self.disk is not None and self.due(self.tally.disk_full, number):
            begun.append(self.fill_the_disk(self.disk))
        if self.gpus is not None and self.due(self.tally.nvml_failures, number):
            begun.append(self.gpus.fail(self.random))
            self.tally.nvml_failures += 1
        return begun

    def fill_the_disk(self, disk: SmallDisk) -> threading.Thread:
        """Have the state directory's disk filled up for a while, soon; what is freed meanwhile is taken as well."""
        begin, length = self.random.uniform(0, 0.5), self.random.uniform(0.1, 0.7)

        def fill() -> None:
            pause = threading.Event()
            pause.wait(begin)
            end = time.monotonic() + length
            self.daemon.short_of_disk = True
            while time.monotonic() < end:
                disk.fill()
                for order in list(self.orders.values()):
                    if order.seen_final is None:
                        order.hurt.add("disk")
                pause.wait(0.1)
            disk.empty()

        self.tally.disk_full += 1
        thread = threading.Thread(target=fill, name="filler")
        thread.start()
        return thread

    def due(self, done: int, number: int) -> bool:
        """About every third round, and never far behind."""
        return self.random.random() < 0.3 or done < 0.2 * number

    def order(self) -> Order:
        """A new job of a random kind."""
        name = f"job-{len(self.orders) + 1}"
        kind = self.random.choice(KINDS)
        file = self.place / "witness" / name
        seconds = self.random.uniform(0, 0.3 if kind == "failing" else self.tempo)
        words = [str(WITNESS), str(file), kind, f"{seconds:.3f}", self.random.choice(("0", "5"))]
        params = {
            "argv": [sys.executable, "-I", "-S", *words],
            "expect_outputs": [] if kind == "failing" else ["made"],
        }
        gpus = self.random.choice((0, 0, 1, 1, 2)) if self.gpus is not None else 0
        self.tally.on_gpus += gpus > 0
        request = {"name": name, "stage": "external", "params": params, "resources": {"gpus": gpus}}
        return Order(name, kind, file, request)

    def cancel(self, order: Order) -> None:
        """Ask for its end, sometimes more than once."""
        if order.id is None:
            return
        order.cancel_asked = True
        for _ in range(self.random.choice((1, 1, 2))):
            grace = self.random.choice((0, 0.3, 20))
            self.ask("POST", f"/jobs/{order.id}/cancel", json={"grace_s": grace})

    def kill(self, role: str) -> int:
        """SIGKILL for one shim or stage, mostly of a program that runs, else newborn; 0 when none came along."""
        by_id = {order.id: order for order in self.orders.values() if order.id is not None}
        open_ids = {job_id for job_id, order in by_id.items() if order.seen_final is None}
        running = self.random.random() < 0.7

        def victims() -> list[Worker]:
            found = [one for one in workers(open_ids) if one.role == role]
            return [one for one in found if by_id[one.job_id].starts] if running else found

        try:
            victim = self.random.choice(until(victims, f"a {role}", 1))
        except TimeoutError:
            return 0
        by_id[victim.job_id].hurt.add(role)
        return int(kill_worker(victim))

    def look(self) -> int:
        """Note final states and zombies; returns how many jobs have not ended."""
        open_jobs = 0
        for row in self.rows():
            order = self.orders.get(row["name"])
            if row["state"] not in FINAL:
                open_jobs += 1
            elif order is not None and order.seen_final is None:
                order.seen_final = row["state"]
            elif order is not None and order.seen_final != row["state"]:
                self.faults.wrong_state.append(f"{row['name']} was {order.seen_final} and is {row['state']}")
        self.watch_zombies()
        return open_jobs

    def watch_zombies(self, patience_s: float = 3.0) -> None:
        """A defunct child that its parent has not collected for seconds is a fault."""
        ids = {order.id for order in self.orders.values() if order.id is not None and order.seen_final is None}
        now = time.monotonic()
        defunct = zombies({self.daemon.pid, *(one.pid for one in workers(ids) if one.role == "shim")})
        self._defunct = {one: self._defunct.get(one, now) for one in defunct}
        for one, since in self._defunct.items():
            if now - since > patience_s and f"pid {one[0]}" not in self.faults.zombies:
                self.faults.zombies.append(f"pid {one[0]}")

    # The end.

    def settle(self) -> None:
        """Wait for every end, then compare with the witness."""
        self.clock.jump(0)
        ids = {order.id for order in self.orders.values() if order.id is not None}
        try:
            until(lambda: self.look() == 0, "the end of every job", ENDED_WITHIN_S, 0.1)
            until(lambda: not carriers(ids), "the end of every process", 10, 0.1)
            until(lambda: not zombies({self.daemon.pid}), "children that are collected", 3, 0.1)
        except TimeoutError as error:
            sys.stderr.write(f"{error}\n")
        self.faults.orphans += [f"pid {pid} of job {job_id}" for pid, job_id in carriers(ids)]
        self.faults.zombies += [f"pid {pid} of the daemon" for pid, _ in zombies({self.daemon.pid})]
        named = self.by_name()
        for order in self.orders.values():
            found = named.pop(order.name, [])
            if len(found) > 1:
                self.faults.doubled.append(f"{order.name}: stored as {[row['id'] for row in found]}")
            job = self.ask("GET", f"/jobs/{order.id}").json() if found else None
            settle(order, job, self.daemon.state / "jobs" / str(order.id) / "record.json", self.faults)
        self.faults.lost += [f"{name}: nobody asked for it" for name in named]
        log = self.daemon.log.read_text(errors="replace")
        self.faults.lock_errors += ["'database is locked' in the daemon's log"] * log.count("database is locked")
        self.faults.wrong_state += ["a traceback in the daemon's log"] * log.count("Traceback (most recent call last)")

    def close(self) -> None:
        """Leave no process behind."""
        self.daemon.kill()
        self.daemon.hang_up()
        self.clock.tidy()
        if self.disk is not None:
            self.disk.empty()
        for _, job_id in carriers({order.id for order in self.orders.values() if order.id is not None}):
            proctree.signal_tree(job_id, None, signal.SIGKILL)

    def unmount(self) -> None:
        """Take the disk away, once what it holds has been read or kept."""
        if self.disk is not None:
            shutil.copytree(self.disk.path, self.place / "state-at-the-end", ignore=shutil.ignore_patterns("reserve"))
            self.disk.close()


def small_disk(path: Path) -> SmallDisk | None:
    """A disk that can be filled, or None without the right to mount one."""
    path.mkdir(mode=0o700)
    return None if cannot_mount(path, DISK_BYTES) else SmallDisk(path)


def run(place: Path, rounds: int, seed: int, tempo: float = 1.5) -> tuple[dict[str, Any], list[str]]:
    """The closing figures, and a line for each fault."""
    started = time.monotonic()
    chaos = Chaos(place, seed, tempo)
    try:
        for number in range(rounds):
            chaos.round(number)
        chaos.settle()
        kills = chaos.daemon.kills
        chaos.daemon.stop()
        faults = chaos.faults.lines()
    finally:
        chaos.close()
        chaos.unmount()
    tally = chaos.tally
    figures = {
        "rounds": tally.rounds,
        "jobs": len(chaos.orders),
        "daemon_kills": kills,
        "shim_kills": tally.shim_kills,
        "stage_kills": tally.stage_kills,
        "disk_full": tally.disk_full,
        "nvml_failures": tally.nvml_failures,
        "jobs_on_gpus": tally.on_gpus,
        "clock_jumps": tally.clock_jumps,
        "answers_lost": tally.answers_lost,
        **chaos.faults.counts(),
        "seed": seed,
        "seconds": round(time.monotonic() - started, 1),
    }
    if not faults:
        shutil.rmtree(place, ignore_errors=True)
    return figures, faults
