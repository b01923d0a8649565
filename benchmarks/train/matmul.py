"""What this machine can do: plain matrix products of the shapes a step is made of, GFLOP/s each."""

import json
import sys
import time
from dataclasses import asdict

import torch
from driver import Size, arguments

size, _, _ = arguments()
SHAPES = {
    "fuse": (size.rows, 3 * size.hidden, size.hidden),
    "project": (size.rows, size.hidden, size.hidden),
    "gate": (size.rows, size.hidden, size.intermediate),
    "down": (size.rows, size.intermediate, size.hidden),
    "head": (size.rows, size.hidden, size.draft),
}


def rate(m: int, k: int, n: int) -> float:
    a, b, out = torch.randn(m, k), torch.randn(n, k), torch.empty(m, n)
    times = []
    for _ in range(5):
        began = time.perf_counter()
        torch.mm(a, b.T, out=out)
        times.append(time.perf_counter() - began)
    return 2 * m * k * n / sorted(times)[len(times) // 2] / 1e9


def useful(size: Size, train_head: bool) -> dict[str, float]:
    """FLOPs a step cannot do without when all rows are supervised, by shape.

    What is computed anew in the backward pass is not counted, the embedding's half of the projections only once.
    """
    h, rows, steps = size.hidden, size.rows, 3
    pairs = rows * (rows + 1) / 2
    return {
        "fuse": 2 * rows * 3 * h * h * 2,
        # Embedding half: forward and weights. Hidden half and output: input too. Attention: 2 products, 4 backward.
        "project": 2 * rows * h * 3 * h * 2 + steps * (2 * rows * h * 4 * h * 3 + 2 * pairs * h * 6),
        "gate": steps * 2 * rows * h * 2 * size.intermediate * 3,
        "down": steps * 2 * rows * h * size.intermediate * 3,
        "head": 2 * rows * h * size.draft * (1 + steps * (3 if train_head else 2)),
    }


print(json.dumps({"ready": True, "torch": torch.__version__, "size": asdict(size)}), flush=True)
for _line in sys.stdin:
    rates = {name: rate(*shape) for name, shape in SHAPES.items()}
    ideal = {
        head: sum(f / rates[n] / 1e6 for n, f in useful(size, head == "trained").items())
        for head in ("frozen", "trained")
    }
    print(json.dumps({"gflops": rates, "ideal_ms": ideal}), flush=True)
