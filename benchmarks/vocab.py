"""`python -m benchmarks.vocab`: the vocabulary map of 163,840 tokens from 10 million supervised ones.

The last line is one JSON object.
"""

import json
import platform
import time
from typing import Any

import torch

from eagle3_core.model.vocab_map import build_vocab_map, count_supervised


def measure(vocab_size: int = 163_840, tokens: int = 10_000_000, draft_vocab_size: int | None = None) -> dict[str, Any]:
    """Seconds to count and to choose; ids are drawn as words are, few often and most hardly ever."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.rand(2 * tokens, generator=generator)
    ids = ((vocab_size**drawn) - 1).to(torch.int32) * 7919 % vocab_size
    mask = torch.zeros(2 * tokens, dtype=torch.bool)
    mask[::2] = True
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    started = time.perf_counter()
    supervised = count_supervised(counts, ids, mask)
    counted = time.perf_counter()
    vocab_map = build_vocab_map(counts, draft_vocab_size or vocab_size // 5, always=range(vocab_size - 20, vocab_size))
    chosen = time.perf_counter()
    return {
        "vocab_size": vocab_size,
        "draft_vocab_size": len(vocab_map.d2t_D),
        "supervised": supervised,
        "coverage": round(vocab_map.coverage, 4),
        "count_s": round(counted - started, 4),
        "choose_s": round(chosen - counted, 4),
        "seconds": round(chosen - started, 4),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }


if __name__ == "__main__":
    print(json.dumps(measure()))
