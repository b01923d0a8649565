"""`make bench-api`: asking for one job, here and of Ray's job server, on this machine, by the same client in turn.

Ours has 1,000 jobs in its database; Ray's head runs in a venv of its own. A token is on for both. The client is wrk
(Debian: apt-get install wrk), else one in Python, which says so. CPU is that of the server's whole process tree.
The last line is one JSON object; ratios are medians of the ratios within a round.
"""

import argparse
import asyncio
import json
import os
import platform
import re
import secrets
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks import tail, waiters
from benchmarks.idle import daemon, load, planned, wait_until
from benchmarks.peers import RAY, peer_python
from client.http import EyasClient

JOBS = 1000
SUBMITS = 10


@dataclass
class Target:
    """A server under load: how to ask it for one job, and which processes are it."""

    url: str
    token: str
    processes: Callable[[], list[psutil.Process]]

    def cpu_s(self) -> float:
        """CPU seconds of all its processes so far."""
        total = 0.0
        for process in self.processes():
            try:
                times = process.cpu_times()
            except psutil.NoSuchProcess:
                continue
            total += times.user + times.system
        return total


@dataclass
class Loaded:
    """What one load of a server showed."""

    rate: float
    p50_ms: float
    p99_ms: float
    cpu_ms: float


def press(target: Target, pollers: int, seconds: float) -> Loaded:
    """Load a server with so many clients that ask for one job, each again as soon as it is answered."""
    before, begin = target.cpu_s(), time.perf_counter()
    count, p50, p99 = (_by_wrk if shutil.which("wrk") else _by_python)(target, pollers, seconds)
    elapsed = time.perf_counter() - begin
    return Loaded(count / elapsed, p50, p99, 1000 * (target.cpu_s() - before) / count)


def _by_wrk(target: Target, pollers: int, seconds: float) -> tuple[int, float, float]:
    command = ["wrk", "--latency", "-t1", f"-c{pollers}", f"-d{seconds:g}s"]
    command += ["-H", f"Authorization: Bearer {target.token}", target.url]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    if "Non-2xx" in out or "Socket errors" in out:
        raise SystemExit(f"{target.url} did not answer all requests:\n{out}")
    found = re.search(r"(\d+) requests in", out)
    assert found is not None, out
    return int(found[1]), _milliseconds(out, "50%"), _milliseconds(out, "99%")


def _milliseconds(out: str, name: str) -> float:
    found = re.search(rf"{name}\s+([\d.]+)(us|ms|s)", out)
    assert found is not None, out
    return float(found[1]) * {"us": 0.001, "ms": 1, "s": 1000}[found[2]]


def _by_python(target: Target, pollers: int, seconds: float) -> tuple[int, float, float]:
    parts = httpx.URL(target.url)
    end = time.perf_counter() + seconds
    times: list[float] = []

    async def poll() -> None:
        reader, writer = await asyncio.open_connection(parts.host, parts.port)
        lines = [f"GET {parts.raw_path.decode()} HTTP/1.1", f"Host: {parts.host}"]
        head = "\r\n".join([*lines, f"Authorization: Bearer {target.token}", "", ""])
        while (begin := time.perf_counter()) < end:
            writer.write(head.encode())
            answer = await reader.readuntil(b"\r\n\r\n")
            assert b" 200 " in answer[:20], answer
            await reader.readexactly(int(answer.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]))
            times.append(1000 * (time.perf_counter() - begin))
        writer.close()

    async def all_of_them() -> None:
        await asyncio.gather(*(poll() for _ in range(pollers)))

    asyncio.run(all_of_them())
    cuts = statistics.quantiles(times, n=100)
    return len(times), cuts[49], cuts[98]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def ray_head(place: Path) -> Iterator[tuple[psutil.Process, httpx.Client, str]]:
    """Ray's head with its job server, on loopback; the process, a client, and the token."""
    python = peer_python(RAY)
    token, dashboard = secrets.token_hex(32), free_port()
    environment = {
        **os.environ,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": token,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "PATH": f"{python.parent}:{os.environ['PATH']}",
    }
    # Ray's sockets lie below its directory, and their names have at most 107 characters.
    command = [str(python.parent / "ray"), "start", "--head", "--block", "--node-ip-address=127.0.0.1"]
    command += [f"--port={free_port()}", f"--dashboard-port={dashboard}", "--dashboard-host=127.0.0.1"]
    command += [f"--temp-dir={place}", "--object-store-memory=100000000", "--num-cpus=16"]
    with (place / "head.log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    head = psutil.Process(process.pid)
    base = f"http://127.0.0.1:{dashboard}"
    try:
        with httpx.Client(base_url=base, headers={"Authorization": f"Bearer {token}"}, timeout=30) as client:
            wait_until(lambda: _answers(client), 120)
            yield head, client, token
    finally:
        for one in [*head.children(recursive=True), head]:
            try:
                one.kill()
            except psutil.NoSuchProcess:
                continue
        process.wait(30)


def _answers(client: httpx.Client) -> bool:
    try:
        return client.get("/api/jobs/").status_code == 200
    except httpx.TransportError:
        return False


def ray_submit_to_running(client: httpx.Client) -> tuple[str, float]:
    """Submit a job to Ray; its id, and the seconds until it is said to run."""
    begin = time.perf_counter()
    answer = client.post("/api/jobs/", json={"entrypoint": "sleep 600"}).raise_for_status().json()
    while client.get(f"/api/jobs/{answer['submission_id']}").json()["status"] != "RUNNING":
        time.sleep(0.005)
    return answer["submission_id"], time.perf_counter() - begin


def submit_to_running(client: EyasClient, request: dict[str, Any]) -> tuple[str, float]:
    """The same here."""
    begin = time.perf_counter()
    [stored] = client.submit(request)
    while client.job(stored["id"])["state"] != "running":
        time.sleep(0.005)
    return stored["id"], time.perf_counter() - begin


def tree(root: psutil.Process) -> list[psutil.Process]:
    """A process and all that it started, save what it runs for its jobs."""
    found = [root]
    for child in root.children(recursive=True):
        try:
            line = " ".join(child.cmdline())
        except psutil.NoSuchProcess:
            continue
        if "sleep 600" not in line and " -m worker" not in line:
            found.append(child)
    return found


def compare(ours: Target, peer: Target, rounds: int, seconds: float) -> dict[str, Any]:
    """Both servers in turn, with 1 and with 50 clients."""
    seen: dict[tuple[str, int], list[Loaded]] = {}
    for _ in range(rounds):
        for pollers in (1, 50):
            for name, target in (("", ours), ("ray_", peer)):
                seen.setdefault((name, pollers), []).append(press(target, pollers, seconds))

    def median(name: str, pollers: int, of: Callable[[Loaded], float]) -> float:
        return round(statistics.median(of(one) for one in seen[name, pollers]), 3)

    found: dict[str, Any] = {}
    for name in ("", "ray_"):
        for pollers in (1, 50):
            found[f"{name}rate_{pollers}"] = median(name, pollers, lambda one: one.rate)
            found[f"{name}p50_ms_{pollers}"] = median(name, pollers, lambda one: one.p50_ms)
            found[f"{name}p99_ms_{pollers}"] = median(name, pollers, lambda one: one.p99_ms)
            found[f"{name}cpu_ms_{pollers}"] = median(name, pollers, lambda one: one.cpu_ms)
    pairs = list(zip(seen["", 50], seen["ray_", 50], strict=True))
    found["rate_ratio_50"] = round(statistics.median(one.rate / other.rate for one, other in pairs), 3)
    found["cpu_ratio_50"] = round(statistics.median(one.cpu_ms / other.cpu_ms for one, other in pairs), 3)
    return found


def against_ray(place: Path, rounds: int, seconds: float) -> dict[str, Any]:
    """Rates, CPU and the time to start a job of both."""
    with (
        daemon(place / "ours", EYAS_MAX_RUNNING=str(SUBMITS + 1)) as (process, client),
        ray_head(place / "ray") as (head, ray, ray_token),
    ):
        root = place / "ours" / "root"
        found: dict[str, Any] = {}
        time.sleep(5)
        found["idle_cpu_percent"], found["idle_rss_mb"] = load(process, 20)
        found["ray_idle_pss_mb"] = round(sum(one.memory_full_info().pss for one in tree(head)) / 1e6, 1)
        starts = [submit_to_running(client, planned(root, f"run-{n}", ["until_stopped", None])) for n in range(SUBMITS)]
        ray_starts = [ray_submit_to_running(ray) for _ in range(SUBMITS)]
        found["submit_to_running_s_p50"] = round(statistics.median(seconds for _, seconds in starts), 3)
        found["ray_submit_to_running_s_p50"] = round(statistics.median(seconds for _, seconds in ray_starts), 3)
        waiting = {**planned(root, "waits"), "depends_on": [starts[0][0]]}
        for _ in range(JOBS // 100):
            client.submit({"jobs": [{**waiting, "name": f"waits-{secrets.token_hex(4)}"} for _ in range(100)]})
        for job_id, _ in starts[1:]:
            client.cancel(job_id, 0)
        for job_id, _ in ray_starts[1:]:
            ray.post(f"/api/jobs/{job_id}/stop")
        wait_until(lambda: all(client.job(job_id)["ended_at"] for job_id, _ in starts[1:]), 60)
        token = client._http.headers["authorization"].removeprefix("Bearer ")
        ours = Target(f"{client.url}/jobs/{starts[0][0]}", token, lambda: tree(process))
        peer = Target(
            f"{ray.base_url}/api/jobs/{ray_starts[0][0]}".replace("//api", "/api"), ray_token, lambda: tree(head)
        )
        found |= compare(ours, peer, rounds, seconds)
        client.cancel(starts[0][0], 0)
        wait_until(lambda: client.job(starts[0][0])["ended_at"], 60)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0)
    chosen = parser.parse_args()
    found: dict[str, Any] = {"client": "wrk" if shutil.which("wrk") else "python"}
    if found["client"] != "wrk":
        print("wrk is not installed: a client in Python loads both, and takes much of the CPU itself", flush=True)
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        place = Path(name)
        for part in ("ours", "ray", "waiters", "tail"):
            (place / part).mkdir()
        found |= against_ray(place, chosen.rounds, chosen.seconds)
        with daemon(place / "waiters", EYAS_MAX_RUNNING="20") as (process, client):
            ids = waiters.jobs(client, place / "waiters" / "root", running=20, count=JOBS, every_s=0.05)
            found |= waiters.measure(process, client, ids)
            for job_id in ids[:20]:
                client.cancel(job_id, 0)
            wait_until(lambda: all(client.job(job_id)["ended_at"] for job_id in ids[:20]), 60)
        with daemon(place / "tail") as (process, client):
            found |= tail.measure(process, client, place / "tail" / "state", place / "tail" / "root")
    found["versions"] = {"python": platform.python_version(), "ray": RAY.rpartition("-")[2]}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
