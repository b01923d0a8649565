"""The output of prepare: every row's tokens and mask in one file, and a manifest that says what they are.

<dir>/rows.safetensors       input_ids int32 [n], loss_mask bool [n], offsets int64 [rows + 1]
<dir>/vocab_map.safetensors  d2t, t2d, token_counts
<dir>/prepared.json          prompts, sizes, fingerprints; written last
"""

from pathlib import Path

import torch
from safetensors.torch import load_file, save

from eagle3_core.contract.headers import read_header
from eagle3_core.contract.jobdir import write_whole
from eagle3_core.contract.prepared_files import MANIFEST, PreparedManifest, load_manifest
from eagle3_core.data.conversations import TokenRow
from eagle3_core.errors import BadData

ROWS = "rows.safetensors"


def save_rows(directory: Path, rows: list[TokenRow]) -> None:
    """Write rows.safetensors."""
    lengths = torch.tensor([0, *(len(row.token_ids_T) for row in rows)], dtype=torch.int64)
    tensors = {
        "input_ids": torch.cat([row.token_ids_T for row in rows]).to(torch.int32),
        "loss_mask": torch.cat([row.loss_mask_T for row in rows]),
        "offsets": lengths.cumsum(0),
    }
    write_whole(directory / ROWS, save(tensors, metadata={"format": "pt"}))


def save_manifest(directory: Path, manifest: PreparedManifest) -> None:
    """Write prepared.json; call it last."""
    write_whole(directory / MANIFEST, manifest.model_dump_json(indent=1).encode())


def load_prepared(directory: Path) -> tuple[PreparedManifest, list[TokenRow]]:
    """Manifest and rows of a finished prepare job.

    Raises:
        BadData: a file is missing or damaged, or rows and manifest disagree.
    """
    manifest = load_manifest(directory)
    read_header(directory / ROWS)
    tensors = load_file(directory / ROWS)
    kinds = {"input_ids": torch.int32, "loss_mask": torch.bool, "offsets": torch.int64}
    for name, dtype in kinds.items():
        if name not in tensors or tensors[name].dtype != dtype or tensors[name].dim() != 1:
            raise BadData(f"{directory / ROWS}: tensor {name} should be a one-dimensional {dtype}; prepare again")
    offsets, ids, mask = tensors["offsets"].tolist(), tensors["input_ids"].to(torch.int64), tensors["loss_mask"]
    if len(offsets) != len(manifest.prompts) + 1 or not len(ids) == len(mask) == manifest.tokens:
        raise BadData(
            f"{directory / ROWS}: {len(offsets) - 1} rows, {len(ids)} input_ids and {len(mask)} loss_mask, {MANIFEST} "
            f"says {len(manifest.prompts)} rows of {manifest.tokens} tokens; prepare again"
        )
    if offsets[0] != 0 or offsets[-1] != len(ids) or offsets != sorted(set(offsets)):
        raise BadData(f"{directory / ROWS}: tensor offsets does not divide {len(ids)} tokens into rows; prepare again")
    return manifest, [
        TokenRow(ids[start:end], mask[start:end], prompt)
        for start, end, prompt in zip(offsets, offsets[1:], manifest.prompts, strict=False)
    ]
