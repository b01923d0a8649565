"""What float8_e4m3 states do to a drafter: one trained on a bfloat16 store, one on an eight-bit store of the same rows.

Both are measured on bfloat16 states of conversations that neither saw, as states are when a drafter serves: loss, and
acceptance length by the walk over the verifier's own greedy text. Each pair is trained with several seeds; how far
these alone drive the drafters of the bfloat16 store apart is told beside the mean difference.
"""

import hashlib
import json
import statistics
from pathlib import Path
from typing import Any

import torch

from benchmarks.stages import run_stage
from eagle3_core.checkpoint.drafter import load_drafter
from eagle3_core.contract.params import TrainParams
from eagle3_core.contract.verifier_files import read_verifier_files
from eagle3_core.data.store import HiddenStateStore
from eagle3_core.evaluation.rounds import RoundCounts
from eagle3_core.evaluation.walk import walk
from eagle3_core.training.setup import make_target_head
from eagle3_core.training.trainer import Trainer
from eagle3_core.training.ttt import counted_rows
from eagle3_core.verifier.tensors import load_verifier_weights

CPU = torch.device("cpu")
MAX_SEQ_LEN, ANSWER_TOKENS, SPECULATIVE_TOKENS = 128, 96, 3
SEEDS, KEYS = (0, 1, 2), ("loss", "tau")


def effect(verifier: Path, prompts: list[str], epochs: int, place: Path, sample: Any) -> dict[str, Any]:
    """loss_delta, tau_delta and bytes_ratio, eight bits against bfloat16.

    Args:
        verifier: a real one.
        prompts: answered by the verifier, a part of them held out.
        epochs: of each training.
        place: an empty directory.
        sample: `sample_responses` of the demo.
    """
    name = hashlib.sha256(json.dumps([prompts, ANSWER_TOKENS]).encode()).hexdigest()[:12]
    answered = place.parent / f"responses-{name}.jsonl"
    if not answered.exists():
        sample(verifier, prompts, answered, ANSWER_TOKENS, 64)
    lines = answered.read_text().splitlines(keepends=True)
    held_out = len(lines) // 5
    training, held = (
        prepare(verifier, lines[held_out:], place / "train"),
        prepare(verifier, lines[:held_out], place / "held"),
    )
    plain_store, plain_bytes = store(verifier, training, "bfloat16", place / "plain")
    eight_store, eight_bytes = store(verifier, training, "float8_e4m3", place / "eight")
    held_store, _ = store(verifier, held, "bfloat16", place / "held-states")
    measured: dict[str, list[dict[str, float]]] = {"plain": [], "eight": []}
    for seed in SEEDS:
        for name, states in (("plain", plain_store), ("eight", eight_store)):
            drafter = train(verifier, states, training, place / f"drafter-{name}-{seed}", epochs, seed)
            measured[name].append(judge(verifier, held_store, drafter))
    pairs = list(zip(measured["plain"], measured["eight"], strict=True))
    spread = {
        key: max(run[key] for run in measured["plain"]) - min(run[key] for run in measured["plain"]) for key in KEYS
    }
    deltas = {key: statistics.mean(eight[key] - plain[key] for plain, eight in pairs) for key in KEYS}
    return {
        **{f"{key}_delta": round(delta, 4) for key, delta in deltas.items()},
        "bytes_ratio": round(eight_bytes / plain_bytes, 4),
        **{key: round(statistics.mean(run[key] for run in measured["plain"]), 4) for key in KEYS},
        **{f"{key}_spread_of_seeds": round(value, 4) for key, value in spread.items()},
        "rows": len(HiddenStateStore(plain_store)),
        "rounds": measured["plain"][0]["rounds"],
    }


def prepare(verifier: Path, lines: list[str], place: Path) -> Path:
    place.mkdir(parents=True)
    (place / "conversations.jsonl").write_text("".join(lines))
    wanted = {"verifier": verifier, "conversations": place / "conversations.jsonl", "max_seq_len": MAX_SEQ_LEN}
    run_stage("prepare", place, **wanted, draft_vocab_size=2048)
    return place / "out"


def store(verifier: Path, prepared: Path, dtype: str, place: Path) -> tuple[Path, int]:
    """The store, and its bytes."""
    done, _ = run_stage("extract", place, verifier=verifier, prepared_dir=prepared, store_dtype=dtype, device="cpu")
    return place / "out", done.data["bytes"]


def train(verifier: Path, states: Path, prepared: Path, place: Path, epochs: int, seed: int) -> Path:
    """A trained drafter."""
    done, _ = run_stage(
        "train",
        place,
        verifier=verifier,
        data_dir=states,
        vocab_map_dir=prepared,
        epochs=epochs,
        lr=1e-3,
        warmup_ratio=0.05,
        max_seq_len=MAX_SEQ_LEN,
        val_ratio=0.0,
        seed=seed,
        norm_before_fc=True,  # this small verifier's states differ in size by a factor of ten between layers
        keep_last=1,
        device="cpu",
    )
    return Path(done.artifacts["checkpoint"])


def judge(verifier: Path, directory: Path, checkpoint: Path) -> dict[str, float]:
    """Loss and acceptance length over the rows of a store."""
    files, states = read_verifier_files(verifier), HiddenStateStore(directory)
    drafter = load_drafter(checkpoint, files, CPU)
    params = TrainParams(
        verifier=str(verifier), data_dir=str(directory), vocab_map_dir=str(checkpoint), max_seq_len=MAX_SEQ_LEN
    )
    rows = [row for row, (_, mask) in enumerate(states.masks()) if counted_rows(mask, 1).any()]
    head = make_target_head(load_verifier_weights(files, drafter.draft_to_target()), "pre_norm", CPU)
    metrics = Trainer(params, drafter, head, states, rows[:1], rows, CPU).validate(lambda: None)
    assert metrics is not None
    counts = RoundCounts(SPECULATIVE_TOKENS)
    for number in rows:
        row = states.read(number)
        prompt = int(row.loss_mask_T.nonzero()[0])
        counts.add(walk(drafter, row.token_ids_T, prompt, row.aux_TAH.float(), SPECULATIVE_TOKENS))
    return {"loss": metrics["loss"], "tau": counts.acceptance_length, "rounds": counts.rounds}
