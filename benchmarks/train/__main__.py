"""Our training step beside those of speculators and SpecForge: the same sizes, in turn, on two threads.

    python -m benchmarks.train [--rounds N] [--threads N] [--sizes small large]

Every driver is a process of its own that waits while another one runs. In each round each takes a few steps; a ratio is
that of the medians within a round, and what is reported is the median over rounds, so that a machine that slows down
slows all of them. The head is frozen beside speculators, which ships it so, and trained beside SpecForge. The last
line is JSON.
"""

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, Self

from benchmarks.peers import SPECFORGE, SPECULATORS, peer_python

HERE = Path(__file__).parent
STEPS = {"small": 6, "large": 2}
WARM_UP = 1
PAIRS = {"frozen": ("ours, head frozen", SPECULATORS), "trained": ("ours, head trained", SPECFORGE)}


class Driver:
    """One process that takes steps when asked."""

    def __init__(self, python: Path, script: str, size: str, half: bool, train_head: bool, threads: int) -> None:
        given = json.dumps({"size": size, "half": half, "train_head": train_head, "threads": threads})
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": os.pathsep.join(paths(script))}
        self._process = subprocess.Popen(
            [python, HERE / script, given], stdin=-1, stdout=-1, stderr=subprocess.DEVNULL, text=True, env=environment
        )
        self.described = self._answer()

    def ask(self, steps: int) -> dict[str, Any]:
        """Take steps and wait for what it says."""
        assert self._process.stdin
        self._process.stdin.write(f"{steps}\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout
        for line in self._process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        raise SystemExit(f"{self._process.args} ended with {self._process.wait()} before it answered")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


def paths(script: str) -> list[str]:
    """Ours also needs this repository."""
    return [str(HERE), str(HERE.parents[1])] if script == "ours.py" else [str(HERE)]


def measure(size: str, half: bool, rounds: int, threads: int) -> dict[str, Any]:
    """All drivers on one size and mask."""
    scripts = {
        "ours, head frozen": (Path(sys.executable), "ours.py", False),
        "ours, head trained": (Path(sys.executable), "ours.py", True),
        SPECULATORS: (peer_python(SPECULATORS), "with_speculators.py", False),
        SPECFORGE: (peer_python(SPECFORGE), "with_specforge.py", True),
        "matmul": (Path(sys.executable), "matmul.py", False),
    }
    said: dict[str, list[dict[str, Any]]] = {name: [] for name in scripts}
    with ExitStack() as stack:
        drivers = {
            name: stack.enter_context(Driver(python, script, size, half, head, threads))
            for name, (python, script, head) in scripts.items()
        }
        for turn in range(WARM_UP + rounds):
            for name, driver in drivers.items():
                answer = driver.ask(STEPS[size])
                if turn >= WARM_UP:
                    said[name].append(answer)
            print(f"{size}, {'half' if half else 'all'} rows, round {turn}: {line(said)}", file=sys.stderr, flush=True)
        rows = json.loads(json.dumps(drivers["matmul"].described["size"]))["rows"]
    return summarise(said, rows)


def line(said: dict[str, list[dict[str, Any]]]) -> str:
    """Milliseconds a step of the latest round."""
    return ", ".join(f"{name} {median(each[-1]['ms']):.0f}" for name, each in said.items() if each and "ms" in each[-1])


def summarise(said: dict[str, list[dict[str, Any]]], rows: int) -> dict[str, Any]:
    """Medians over rounds."""
    ms = {name: [median(answer["ms"]) for answer in each] for name, each in said.items() if name != "matmul"}
    peak = {name: said[name][-1]["peak_mib"] for name in ms}
    ideal = {head: [answer["ideal_ms"][head] for answer in said["matmul"]] for head in PAIRS}
    return {
        "tokens_per_s": {name: round(rows / median(each) * 1e3, 1) for name, each in ms.items()},
        "ms": {name: round(median(each), 1) for name, each in ms.items()},
        "ms_range": {name: [round(min(each), 1), round(max(each), 1)] for name, each in ms.items()},
        "peak_mib": {name: round(value, 1) for name, value in peak.items()},
        "speed_ratio": {
            head: round(median(b / a for a, b in zip(ms[ours], ms[peer], strict=True)), 3)
            for head, (ours, peer) in PAIRS.items()
        },
        "memory_ratio": {head: round(peak[ours] / peak[peer], 3) for head, (ours, peer) in PAIRS.items()},
        "matmul_share": {
            head: round(median(i / t for i, t in zip(ideal[head], ms[ours], strict=True)), 3)
            for head, (ours, _) in PAIRS.items()
        },
        "gflops": {name: round(rate, 1) for name, rate in said["matmul"][-1]["gflops"].items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--sizes", nargs="+", choices=tuple(STEPS), default=list(STEPS))
    given = parser.parse_args()
    load = os.getloadavg()[0]
    cells = {
        (size, half): measure(size, half, given.rounds, given.threads) for size in given.sizes for half in (False, True)
    }
    # Against the better of the peers: the pair in which we do worse.
    report: dict[str, Any] = {
        f"speed_ratio_{name}": {size: min(cells[size, half]["speed_ratio"].values()) for size in given.sizes}
        for name, half in (("full", False), ("half", True))
    }
    report["memory_ratio"] = {size: max(cells[size, False]["memory_ratio"].values()) for size in given.sizes}
    if "large" in given.sizes:
        report["matmul_share"] = min(cells["large", False]["matmul_share"].values())
    named = {f"{size}, {'half' if half else 'all'} rows": cell for (size, half), cell in cells.items()}
    report["tokens_per_s"] = {
        name: {who: value for who, value in cell["tokens_per_s"].items() if who.startswith("ours")}
        for name, cell in named.items()
    }
    report["peers"] = named
    report["threads"], report["load_before"] = given.threads, round(load, 2)
    report["versions"] = {
        "torch": importlib.metadata.version("torch"),
        "speculators": SPECULATORS.partition("-")[2],
        "specforge": SPECFORGE.partition("-")[2],
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
