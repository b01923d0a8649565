"""`make bench-judge`: the judge on a drafter of Kimi-K2.5's size, 4.7 GB of weights and 4.8 GB of optimizer state.

    quick               the call, in a fresh process that has imported it; the imports and the process are told apart
    full                wall time of the call in a fresh process, from a cold page cache; peak memory over what the
                        process held after its imports
    disk, digest        cold reads of the same files with the same buffer, and blake3 over a buffer in memory, in turn
                        with the above; full_ratio_to_limit is against the slower of the two in the same round
    training_slowdown   a training on all cores, while worker.judge judges beside it as for a training job, and while
                        that is stopped, in turn: the median over the pairs

Everything is made in .bench/ and removed afterwards. The last line is one JSON object; medians over the rounds, each
round's figures beside them.
"""

import argparse
import contextlib
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import blake3
import safetensors
import torch
from safetensors.torch import save_file

from eagle3_core.checkpoint.config_styles import speculators_config
from eagle3_core.checkpoint.stream import Stream
from eagle3_core.checkpoint.write import write_manifest
from eagle3_core.contract.drafter_config import DrafterConfig, expected_tensors
from worker.judge import MB_PER_S_BESIDE_TRAINING

PLACE = Path(__file__).resolve().parent.parent / ".bench"
PIECE = 1 << 24
WINDOW = 60
"""Steps with and without the judge that are compared, before the machine's speed has drifted."""

KIMI = DrafterConfig(
    hidden_size=7168,
    intermediate_size=18432,
    num_attention_heads=64,
    num_key_value_heads=64,
    head_dim=128,
    vocab_size=163840,
    draft_vocab_size=32000,
    aux_layer_ids=(2, 30, 58),
    max_position_embeddings=262144,
    rope={"rope_type": "default", "rope_theta": 1e6},
)

QUICK = """
import time; began = time.process_time()
import json, sys; from pathlib import Path
from eagle3_core.checkpoint.quick import judge_quick
imported = time.process_time(); start = time.perf_counter()
verdict = judge_quick(Path(sys.argv[1]))
wall = time.perf_counter() - start
print(json.dumps({"quick_ms": 1e3 * wall, "import_ms": 1e3 * (imported - began), "verdict": verdict.verdict,
                  "torch": "torch" in sys.modules}))
"""

FULL = """
import json, re, sys, time; from pathlib import Path
import torch
from eagle3_core.checkpoint.judge import judge
torch.set_num_threads(1)
def kilobytes(key): return int(re.search(key + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
before = kilobytes("VmRSS"); start = time.perf_counter(); busy = time.process_time()
verdict = judge(Path(sys.argv[1]))
print(json.dumps({"seconds": time.perf_counter() - start, "cpu": time.process_time() - busy,
                  "peak_rss_mb": (kilobytes("VmHWM") - before) * 1024 / 1e6, "verdict": verdict.verdict,
                  "found": [f.code for f in verdict.findings if f.severity != "info"]}))
"""


def make_checkpoint(directory: Path) -> None:
    """A drafter of random weights, with moments in bfloat16 as speculators writes them, and a manifest."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(speculators_config(KIMI, "moonshotai/Kimi-K2.5", ["Kimi"], 3)))
    generator = torch.Generator().manual_seed(0)
    tensors, moments = {}, {}
    for number, (name, (shape, kind)) in enumerate(expected_tensors(KIMI).items()):
        if kind != "float":
            continue
        tensors[name] = torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)
        if name != "embed_tokens.weight":
            moments[number] = (name, shape)
    kept = torch.randperm(KIMI.vocab_size, generator=generator)[: KIMI.draft_vocab_size].sort().values
    tensors["d2t"] = kept - torch.arange(len(kept))
    tensors["t2d"] = torch.isin(torch.arange(KIMI.vocab_size), kept)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    tensors.clear()
    state = {
        number: {
            "step": torch.tensor(1000.0),
            "exp_avg": torch.empty(shape, dtype=torch.bfloat16).normal_(0, 1e-4, generator=generator),
            "exp_avg_sq": torch.empty(shape, dtype=torch.bfloat16).normal_(0, 1e-4, generator=generator).abs_(),
        }
        for number, (_, shape) in moments.items()
    }
    group = {"lr": 1e-4, "params": list(moments), "param_names": [name for name, _ in moments.values()]}
    torch.save({"state": state, "param_groups": [group]}, directory / "optimizer_state_dict.pt")
    state.clear()
    write_manifest(directory, epoch=0, step=1000, extra={})


def forget(directory: Path) -> None:
    """Drop the files from the page cache."""
    for file in directory.iterdir():
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def disk_rate(directory: Path) -> float:
    """GB/s of reading every file from a cold cache with the judge's own reader, and looking at nothing."""
    forget(directory)
    stream, total, began = Stream(), 0, time.perf_counter()
    for path in sorted(directory.iterdir()):
        with stream.opened(path) as file:
            total += sum(len(piece) for piece in file.pieces(0, path.stat().st_size))
    return total / (time.perf_counter() - began) / 1e9


def digest_rate(pieces: int = 128) -> float:
    """GB/s of blake3 over a buffer in memory."""
    buffer, digest = memoryview(os.urandom(PIECE)), blake3.blake3()
    began = time.perf_counter()
    for _ in range(pieces):
        digest.update(buffer)
    return pieces * PIECE / (time.perf_counter() - began) / 1e9


def run(code: str, directory: Path) -> dict[str, Any]:
    command = [sys.executable, "-P", "-c", code, str(directory)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    answer = dict(json.loads(done.stdout))
    assert answer["verdict"] == "valid", answer
    return answer


def judge_rounds(directory: Path, rounds: int) -> dict[str, Any]:
    size = sum(file.stat().st_size for file in directory.iterdir())
    names = ("quick_ms", "quick_import_ms", "disk", "digest", "full", "ratio", "cpu", "rss")
    found: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        quick = run(QUICK, directory)
        assert not quick["torch"]
        found["quick_ms"].append(quick["quick_ms"])
        found["quick_import_ms"].append(quick["import_ms"])
        found["disk"].append(disk_rate(directory))
        found["digest"].append(digest_rate())
        forget(directory)
        full = run(FULL, directory)
        found["full"].append(size / full["seconds"] / 1e9)
        found["ratio"].append(found["full"][-1] / min(found["disk"][-1], found["digest"][-1]))
        found["cpu"].append(full["cpu"])
        found["rss"].append(full["peak_rss_mb"])
    middle = {key: statistics.median(values) for key, values in found.items()}
    return {
        "bytes": size,
        "quick_ms": round(middle["quick_ms"], 2),
        "quick_import_ms": round(middle["quick_import_ms"], 1),
        "full_gb_per_s": round(middle["full"], 3),
        "disk_gb_per_s": round(middle["disk"], 3),
        "digest_gb_per_s": round(middle["digest"], 3),
        "full_ratio_to_limit": round(middle["ratio"], 3),
        "full_cpu_s": round(middle["cpu"], 2),
        "peak_rss_mb": round(max(found["rss"]), 1),
        "rounds": {key: [round(value, 3) for value in values] for key, values in found.items()},
    }


def training(directory: Path, pairs: int) -> dict[str, Any]:
    """Steps of a small training on all cores, while the judge of its last checkpoint works and while it is stopped."""
    command = [sys.executable, "-m", "benchmarks.steps"]
    judging = [sys.executable, "-P", "-m", "worker.judge", "--max-mb-per-s", str(MB_PER_S_BESIDE_TRAINING)]
    forget(directory)
    judge = subprocess.Popen([*judging, "--", str(directory)], stdout=subprocess.DEVNULL)
    while bytes_read(judge.pid) < PIECE * 8:  # until it has begun to read
        assert judge.poll() is None, "the judge ended"
        time.sleep(0.05)
    judge.send_signal(signal.SIGSTOP)
    steps = subprocess.Popen(command, cwd=PLACE.parent, stdout=subprocess.PIPE, text=True)
    beside, alone, ratios, read = [], [], [], 0
    try:
        take(steps, 20)
        for _ in range(pairs):
            alone.append(take(steps, WINDOW))
            before = bytes_read(judge.pid)
            judge.send_signal(signal.SIGCONT)
            beside.append(take(steps, WINDOW))
            judge.send_signal(signal.SIGSTOP)
            read += bytes_read(judge.pid) - before
            ratios.append(beside[-1] / alone[-1] - 1)
    finally:
        for process in (steps, judge):
            process.kill()
            process.wait()
    return {
        "training_slowdown": round(statistics.median(ratios), 4),
        "training_slowdowns": [round(ratio, 4) for ratio in ratios],
        "judge_beside_mb_per_s": round(read / sum(beside) / 1e6, 1),
        "training_step_ms": round(1e3 * statistics.median(alone) / WINDOW, 1),
    }


def take(steps: subprocess.Popen[str], count: int) -> float:
    """Seconds of so many steps."""
    assert steps.stdout
    return sum((float(steps.stdout.readline()) for _ in range(count)), 0.0)


def bytes_read(pid: int) -> int:
    """Bytes that a process has read so far."""
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("rchar:")).split()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--keep", action="store_true", help="leave .bench/ behind")
    chosen = parser.parse_args()
    directory = PLACE / "checkpoint"
    try:
        if not (directory / "manifest.json").exists():
            shutil.rmtree(PLACE, ignore_errors=True)
            make_checkpoint(directory)
        found = judge_rounds(directory, chosen.rounds)
        found |= training(directory, 5 * chosen.rounds)
    finally:
        if not chosen.keep:
            shutil.rmtree(PLACE, ignore_errors=True)
    with contextlib.suppress(OSError):
        found["load_average"] = os.getloadavg()
    found["versions"] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "safetensors": safetensors.__version__,
        "blake3": blake3.__version__,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
