"""Steps of a small training without end, for a judge to run beside: prints the seconds of each.

H 256, V 8192, D 2048, rows of 512 tokens, all of the answer's half supervised.
"""

import tempfile
import time
from pathlib import Path

import torch

from eagle3_core.contract.drafter_config import DrafterConfig
from eagle3_core.contract.params import TrainParams
from eagle3_core.contract.store_files import StoreMeta
from eagle3_core.data.conversations import TokenRow
from eagle3_core.data.store import HiddenStateStore
from eagle3_core.data.store_writer import UnfinishedStore, stored_form
from eagle3_core.model.drafter import Eagle3Drafter
from eagle3_core.training.setup import make_target_head
from eagle3_core.training.trainer import Trainer
from eagle3_core.verifier.tensors import VerifierWeights

HIDDEN, VOCAB, DRAFT, TOKENS, ROWS = 256, 8192, 2048, 512, 8


def make_trainer(place: Path) -> Trainer:
    meta = StoreMeta(
        verifier="none",
        config_fingerprint="",
        tokenizer_fingerprint="",
        hidden_size=HIDDEN,
        num_hidden_layers=8,
        vocab_size=VOCAB,
        layer_ids=(2, 4, 5),
        last_layer_id=8,
        dtype="bfloat16",
    )
    mask = torch.arange(TOKENS) >= TOKENS // 2
    rows = [(row, TokenRow(torch.randint(0, VOCAB, (TOKENS,)), mask, f"{row}")) for row in range(ROWS)]
    store = UnfinishedStore(place, meta, [rows])
    writer = store.begin(0)
    writer.write(*stored_form(torch.randn(ROWS * TOKENS, 4, HIDDEN), meta))
    store.end(0, writer)
    store.finish()
    config = DrafterConfig(
        hidden_size=HIDDEN,
        intermediate_size=688,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=64,
        vocab_size=VOCAB,
        draft_vocab_size=DRAFT,
        aux_layer_ids=(2, 4, 5),
        rope={"rope_type": "default", "rope_theta": 1e4},
    )
    weights = VerifierWeights(
        torch.randn(VOCAB, HIDDEN), torch.randn(DRAFT, HIDDEN) * 0.05, torch.ones(HIDDEN), 1e-6, 1.0, None, ()
    )
    params = TrainParams(
        verifier="none", data_dir=str(place), vocab_map_dir="none", epochs=1000, max_seq_len=TOKENS, val_ratio=0
    )
    cpu = torch.device("cpu")
    head = make_target_head(weights, "pre_norm", cpu)
    return Trainer(params, Eagle3Drafter(config), head, HiddenStateStore(place), list(range(ROWS)), [], cpu)


def main() -> None:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as place:
        trainer = make_trainer(Path(place))
        last = time.perf_counter()

        def step(_: object) -> None:
            nonlocal last
            now = time.perf_counter()
            print(f"{now - last:.6f}", flush=True)
            last = now

        while True:
            trainer.train_epoch(step)
            trainer.next_epoch()


if __name__ == "__main__":
    main()
