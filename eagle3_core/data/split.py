"""Training and validation rows, split by prompt, so that no prompt is on both sides."""

import hashlib


def split_by_prompt(prompts: list[str], val_ratio: float, seed: int) -> tuple[list[int], list[int]]:
    """Row numbers (training, validation), each ascending.

    The distinct prompts are put into an order that depends on the seed alone; the first `val_ratio` of them, rounded,
    are held out: at least one when the ratio is above zero and there are two, and never all.

    Args:
        prompts: digest of each row's prompt.
        val_ratio: share of the distinct prompts to hold out.
        seed: decides which.
    """
    distinct = sorted(set(prompts), key=lambda prompt: hashlib.sha256(f"{seed}:{prompt}".encode()).digest())
    count = round(val_ratio * len(distinct))
    if val_ratio > 0:
        count = max(1, count)
    held_out = set(distinct[: min(count, len(distinct) - 1)])
    train = [row for row, prompt in enumerate(prompts) if prompt not in held_out]
    return train, [row for row, prompt in enumerate(prompts) if prompt in held_out]
