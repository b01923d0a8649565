"""Wake-up latency of long polls: many clients wait for many jobs, of which one tells of progress every 50 ms.

Real workers tell of it. The latency is from the time a stage put into its event to the arrival of the last byte of the
answer to whoever waited for that job: file, loop, database and HTTP are all in it. Alone: python -m benchmarks.waiters
"""

import asyncio
import json
import platform
import resource
import statistics
import tempfile
import time
from datetime import datetime
from pathlib import Path

import psutil

from benchmarks.idle import daemon, load, planned, wait_until
from client.http import EyasClient


class Connection:
    """One keep-alive connection; as little work for this side as can be."""

    def __init__(self, port: int, token: str) -> None:
        self._port = port
        self._head = f"Host: 127.0.0.1\r\nAuthorization: Bearer {token}\r\n"
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def ask(self, method: str, path: str) -> tuple[int, bytes]:
        """Status and body."""
        if self._reader is None or self._writer is None:
            self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        body = "Content-Type: application/json\r\nContent-Length: 0\r\n" if method == "POST" else ""
        self._writer.write(f"{method} {path} HTTP/1.1\r\n{self._head}{body}\r\n".encode())
        head = await self._reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
        return int(head[9:12]), await self._reader.readexactly(length)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


async def _wait(connection: Connection, job_id: str, latencies: list[float]) -> None:
    """Ask again and again, noting how old the news was."""
    _, body = await connection.ask("GET", f"/jobs/{job_id}")
    while True:
        since = json.loads(body)["version"]
        status, body = await connection.ask("GET", f"/jobs/{job_id}?wait=10m&until=progress&since={since}")
        heard = time.time()
        job = json.loads(body)
        if status == 200 and job["step"] is not None:
            latencies.append(heard - datetime.fromisoformat(job["last_event_at"]).timestamp())


async def _run(port: int, token: str, ids: list[str], waiters: int, seconds: float) -> list[float]:
    latencies: list[float] = []
    connections = [Connection(port, token) for _ in range(waiters)]
    tasks = []
    for number, connection in enumerate(connections):
        tasks.append(asyncio.create_task(_wait(connection, ids[number % len(ids)], latencies)))
        if number % 50 == 0:
            await asyncio.sleep(0.05)
    await asyncio.sleep(3)
    latencies.clear()
    await asyncio.sleep(seconds)
    for task in tasks:
        task.cancel()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    for connection in connections:
        connection.close()
    assert all(isinstance(one, asyncio.CancelledError) for one in ended), [one for one in ended if one][:3]
    return latencies


def measure(
    process: psutil.Process, client: EyasClient, ids: list[str], waiters: int = 2000, seconds: float = 30
) -> dict[str, float]:
    """Latencies of so many waiters over these jobs, some of which run, and what they cost the daemon."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 16_384), hard))
    token = client._http.headers["authorization"].removeprefix("Bearer ")
    threads, rss = process.num_threads(), process.memory_info().rss
    quiet, _ = load(process, 5)
    port = int(client.url.rpartition(":")[2])
    before = process.cpu_times()
    latencies = asyncio.run(_run(port, token, ids, waiters, seconds))
    after = process.cpu_times()
    cuts = statistics.quantiles(latencies, n=100)
    return {
        "waiters": waiters,
        "waited_jobs": len(ids),
        "wakeups": len(latencies),
        "wakeup_p50_ms": round(1000 * cuts[49], 1),
        "wakeup_p99_ms": round(1000 * cuts[98], 1),
        "wakeup_max_ms": round(1000 * max(latencies), 1),
        "waiters_threads": process.num_threads() - threads,
        "waiters_rss_mb": round((process.memory_info().rss - rss) / 1e6, 1),
        "cpu_percent_without_waiters": quiet,
        "waiters_cpu_s": round(after.user + after.system - before.user - before.system, 1),
    }


def jobs(client: EyasClient, root: Path, running: int, count: int, every_s: float) -> list[str]:
    """Ids of `count` jobs, of which so many run, and one tells of progress every so many seconds; the others wait."""
    pulse = [planned(root, f"pulse-{number}", ["pulse", running * every_s]) for number in range(running)]
    found = [client.submit(one)[0]["id"] for one in pulse]
    waits = {**planned(root, "waits"), "depends_on": found[:1]}
    while len(found) < count:
        some = [{**waits, "name": f"waits-{len(found) + n}"} for n in range(min(100, count - len(found)))]
        found += [job["id"] for job in client.submit({"jobs": some})]
    wait_until(lambda: all(client.job(job_id)["step"] for job_id in found[:running]), 120)
    return found


def main() -> None:
    with tempfile.TemporaryDirectory() as place, daemon(Path(place), EYAS_MAX_RUNNING="20") as (process, client):
        ids = jobs(client, Path(place) / "root", running=20, count=1000, every_s=0.05)
        found = measure(process, client, ids)
        for job_id in ids[:20]:
            client.cancel(job_id, 0)
        wait_until(lambda: all(client.job(job_id)["ended_at"] for job_id in ids[:20]), 60)
    print(json.dumps({**found, "versions": {"python": platform.python_version(), "psutil": psutil.__version__}}))


if __name__ == "__main__":
    main()
