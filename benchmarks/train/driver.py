"""What the drivers of this benchmark share: the sizes, the data, and the talk with the parent.

torch only, since it also runs inside the peers' venvs. A driver builds its model once, says {"ready": ...}, and for
each line "n" on its stdin takes n optimizer steps and answers
{"ms": [...], "peak_mib": ..., "loss": ...}, so that drivers can take turns on an otherwise idle machine.
"""

import gc
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

TTT_STEPS, LEARNING_RATE, GRAD_CLIP, SEED = 3, 1e-4, 1.0, 0
TURNS = 4


@dataclass(frozen=True)
class Size:
    hidden: int
    intermediate: int
    heads: int
    vocab: int
    draft: int
    rows: int


SIZES = {
    "small": Size(256, 688, 4, 8192, 2048, 512),
    "large": Size(1024, 2752, 16, 32768, 8192, 1024),
}


@dataclass
class Data:
    """One document of rows + 1 tokens. `mask`: supervised tokens, all or the second half of each turn of a chat."""

    tokens: torch.Tensor
    mask: torch.Tensor
    aux: torch.Tensor
    last: torch.Tensor


def make_data(size: Size, half: bool) -> Data:
    generator = torch.Generator().manual_seed(SEED)
    count = size.rows + 1
    mask = torch.ones(count, dtype=torch.bool)
    if half:
        turn = size.rows // TURNS
        mask = torch.arange(count) % turn >= turn // 2
    return Data(
        torch.randint(0, size.vocab, (count,), generator=generator),
        mask,
        torch.randn(count, 3 * size.hidden, generator=generator),
        torch.randn(count, size.hidden, generator=generator),
    )


def head_weight(size: Size) -> torch.Tensor:
    """The verifier's head [V, H]; its rows are of length about 1, as a real head's logits ask for."""
    return torch.randn(size.vocab, size.hidden, generator=torch.Generator().manual_seed(SEED + 1)) * size.hidden**-0.5


def kept_tokens(size: Size) -> torch.Tensor:
    """bool [V], the draft vocabulary: every fourth token."""
    return torch.arange(size.vocab) % (size.vocab // size.draft) == 0


def arguments() -> tuple[Size, bool, bool]:
    """Size, whether half is supervised, whether the head is trained."""
    given = json.loads(sys.argv[1])
    torch.set_num_threads(given["threads"])
    torch.manual_seed(SEED)
    return SIZES[given["size"]], given["half"], given["train_head"]


def serve(step: Callable[[], float], described: dict[str, object]) -> None:
    """Take steps when asked; the peak is what the process held above what it held before its first step."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    built = _status("VmRSS")
    print(json.dumps({"ready": True, "torch": torch.__version__} | described), flush=True)
    for line in sys.stdin:
        times, cpu = [], []
        for _ in range(int(line)):
            began, spent = time.perf_counter(), time.process_time()
            loss = step()
            times.append((time.perf_counter() - began) * 1e3)
            cpu.append((time.process_time() - spent) * 1e3)
        print(
            json.dumps({"ms": times, "cpu_ms": cpu, "peak_mib": (_status("VmHWM") - built) / 1024, "loss": loss}),
            flush=True,
        )


def _status(field: str) -> int:
    """KiB, from /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))
