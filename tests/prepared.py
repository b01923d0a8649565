"""The output of a prepare job, made of rows."""

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from eagle3_core.contract.prepared_files import MANIFEST, PreparedManifest
from eagle3_core.contract.verifier_files import tokenizer_fingerprint


def write_prepared(directory: Path, verifier: Path, rows: list[tuple[Tensor, Tensor]]) -> Path:
    """Write (token ids, loss mask) of each row as a prepare job with this verifier would leave them."""
    directory.mkdir(parents=True)
    lengths = torch.tensor([0, *(len(ids) for ids, _ in rows)])
    tensors = {
        "input_ids": torch.cat([ids for ids, _ in rows]).to(torch.int32),
        "loss_mask": torch.cat([mask for _, mask in rows]),
        "offsets": lengths.cumsum(0),
    }
    save_file(tensors, directory / "rows.safetensors", metadata={"format": "pt"})
    manifest = PreparedManifest(
        verifier=str(verifier),
        tokenizer_fingerprint=tokenizer_fingerprint(verifier),
        conversations="conversations.jsonl",
        max_seq_len=int(lengths.max()),
        draft_vocab_size=64,
        tokens=int(lengths.sum()),
        supervised_tokens=int(tensors["loss_mask"].sum()),
        vocab_coverage=1.0,
        dropped={},
        lines=list(range(1, len(rows) + 1)),
        prompts=[f"prompt-{row}" for row in range(len(rows))],
    )
    (directory / MANIFEST).write_text(manifest.model_dump_json())
    return directory
