"""What float8_e4m3 states do to a drafter: one trained on a bfloat16 store, one on an eight-bit store of the same rows.

Both are measured on the same held-out rows of the bfloat16 store, as states are when a drafter serves: validation loss,
and acceptance length by the walk over the verifier's own greedy text. A third drafter, of the first store with another
seed, tells what chance alone does.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from benchmarks.stages import run_stage
from eagle3_core.checkpoint.drafter import load_drafter
from eagle3_core.contract.params import TrainParams
from eagle3_core.contract.verifier_files import read_verifier_files
from eagle3_core.data.split import split_by_prompt
from eagle3_core.data.store import HiddenStateStore
from eagle3_core.evaluation.rounds import RoundCounts
from eagle3_core.evaluation.walk import walk
from eagle3_core.training.setup import make_target_head
from eagle3_core.training.trainer import Trainer
from eagle3_core.training.ttt import counted_rows
from eagle3_core.verifier.tensors import load_verifier_weights

CPU = torch.device("cpu")
MAX_SEQ_LEN, ANSWER_TOKENS, SPECULATIVE_TOKENS, VAL_RATIO = 128, 96, 3, 0.2


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
    conversations = place.parent / f"responses-{name}.jsonl"
    if not conversations.exists():
        sample(verifier, prompts, conversations, ANSWER_TOKENS, 64)
    run_stage(
        "prepare",
        place / "prepare",
        verifier=verifier,
        conversations=conversations,
        draft_vocab_size=2048,
        max_seq_len=MAX_SEQ_LEN,
    )
    stores, sizes = {}, {}
    for dtype in ("bfloat16", "float8_e4m3"):
        here = place / dtype
        prepared = place / "prepare" / "out"
        done, _ = run_stage("extract", here, verifier=verifier, prepared_dir=prepared, store_dtype=dtype, device="cpu")
        stores[dtype], sizes[dtype] = here / "out", done.data["bytes"]
    measured = {}
    for run, dtype, seed in (("plain", "bfloat16", 0), ("eight", "float8_e4m3", 0), ("chance", "bfloat16", 1)):
        drafter = train(verifier, stores[dtype], place, run, epochs, seed)
        measured[run] = judge(verifier, stores["bfloat16"], drafter)
    plain, eight, chance = (measured[run] for run in ("plain", "eight", "chance"))
    return {
        "loss_delta": round(eight["loss"] - plain["loss"], 4),
        "tau_delta": round(eight["tau"] - plain["tau"], 4),
        "bytes_ratio": round(sizes["float8_e4m3"] / sizes["bfloat16"], 4),
        "loss": round(plain["loss"], 4),
        "tau": round(plain["tau"], 4),
        "loss_delta_of_another_seed": round(chance["loss"] - plain["loss"], 4),
        "tau_delta_of_another_seed": round(chance["tau"] - plain["tau"], 4),
        "rows": len(HiddenStateStore(stores["bfloat16"])),
        "rounds": eight["rounds"],
    }


def train(verifier: Path, store: Path, place: Path, name: str, epochs: int, seed: int) -> Path:
    """A trained drafter."""
    done, _ = run_stage(
        "train",
        place / name,
        verifier=verifier,
        data_dir=store,
        vocab_map_dir=place / "prepare" / "out",
        epochs=epochs,
        lr=1e-3,
        warmup_ratio=0.05,
        max_seq_len=MAX_SEQ_LEN,
        val_ratio=VAL_RATIO,
        seed=seed,
        norm_before_fc=True,  # this small verifier's states differ in size by a factor of ten between layers
        keep_last=1,
        device="cpu",
    )
    return Path(done.artifacts["checkpoint"])


def judge(verifier: Path, directory: Path, checkpoint: Path) -> dict[str, float]:
    """Loss and acceptance length over the held-out rows of a store."""
    files, store = read_verifier_files(verifier), HiddenStateStore(directory)
    drafter = load_drafter(checkpoint, files, CPU)
    params = TrainParams(
        verifier=str(verifier),
        data_dir=str(directory),
        vocab_map_dir=str(checkpoint),
        max_seq_len=MAX_SEQ_LEN,
        val_ratio=VAL_RATIO,
    )
    usable = [bool(counted_rows(mask, 1).any()) for _, mask in store.masks()]
    held_out = split_by_prompt([entry.prompt for entry in store.entries], VAL_RATIO, 0)[1]
    rows = [row for row in held_out if usable[row]]
    head = make_target_head(load_verifier_weights(files, drafter.draft_to_target()), "pre_norm", CPU)
    metrics = Trainer(params, drafter, head, store, rows[:1], rows, CPU).validate(lambda: None)
    counts = RoundCounts(SPECULATIVE_TOKENS)
    drafter.eval()
    for number in rows:
        row = store.read(number)
        prompt = int(row.loss_mask_T.nonzero()[0])
        counts.add(walk(drafter, row.token_ids_T, prompt, row.aux_TAH.float(), SPECULATIVE_TOKENS))
    return {"loss": metrics["loss"], "tau": counts.acceptance_length, "rounds": counts.rounds}
