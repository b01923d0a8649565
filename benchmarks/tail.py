"""First byte of the last lines of a 2 GB log, and growth of the daemon's memory. Alone: python -m benchmarks.tail"""

import json
import platform
import socket
import statistics
import tempfile
import time
from pathlib import Path

import psutil

from benchmarks.idle import daemon, planned, wait_until
from client.http import EyasClient

BLOCK = b"".join(
    b"step %7d loss 2.3456 lr 3.00e-05 tokens/s 1490 some more words to fill the line\n" % n for n in range(200_000)
)


def write_log(path: Path, size: int) -> None:
    """A log of so many bytes, none of them a hole."""
    with path.open("wb") as file:
        while file.tell() < size:
            file.write(BLOCK)


def first_byte_ms(client: EyasClient, path: str) -> float:
    """Milliseconds from the request to the first byte of the body, on a new connection."""
    with socket.create_connection(("127.0.0.1", int(client.url.rpartition(":")[2]))) as connection:
        head = f"Host: 127.0.0.1\r\nAuthorization: {client._http.headers['authorization']}\r\n"
        begin = time.perf_counter()
        connection.sendall(f"GET {path} HTTP/1.1\r\n{head}\r\n".encode())
        got = b""
        while not got.partition(b"\r\n\r\n")[2]:
            got += connection.recv(65_536)
        elapsed = time.perf_counter() - begin
    assert b" 200 OK" in got[:20], got[:200]
    return 1000 * elapsed


def measure(
    process: psutil.Process, client: EyasClient, state: Path, root: Path, size: int = 2 << 30
) -> dict[str, float]:
    """The first and the typical one of thirty tails of a log of `size` bytes, also as a person reads it."""
    [stored] = client.submit(planned(root, "tailed"))
    wait_until(lambda: client.job(stored["id"])["ended_at"], 60)
    log = state / "jobs" / stored["id"] / "attempts" / "1" / "output.log"
    write_log(log, size)
    path = f"/jobs/{stored['id']}/log?tail=15"
    before = process.memory_info().rss
    times = [first_byte_ms(client, path) for _ in range(30)]
    clean = [first_byte_ms(client, f"{path}&view=clean") for _ in range(10)]
    followed = first_byte_ms(client, f"{path}&follow=true")
    thousands = first_byte_ms(client, f"/jobs/{stored['id']}/log?tail=10000")
    growth = process.memory_info().rss - before
    log.unlink()
    return {
        "tail_log_bytes": size,
        "tail_first_byte_ms": round(statistics.median(times), 2),
        "tail_first_byte_first_ms": round(times[0], 2),
        "tail_first_byte_max_ms": round(max(times), 2),
        "tail_clean_first_byte_ms": round(statistics.median(clean), 2),
        "tail_follow_first_byte_ms": round(followed, 2),
        "tail_10000_lines_first_byte_ms": round(thousands, 2),
        "tail_rss_growth_mb": round(growth / 1e6, 1),
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as place, daemon(Path(place)) as (process, client):
        found = measure(process, client, Path(place) / "state", Path(place) / "root")
    print(json.dumps({**found, "versions": {"python": platform.python_version(), "psutil": psutil.__version__}}))


if __name__ == "__main__":
    main()
