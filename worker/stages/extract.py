"""extract: prepared rows -> a store of the verifier's aux and last hidden states."""

from collections.abc import Iterator
from pathlib import Path

import torch

from eagle3_core.contract.params import ExtractParams
from eagle3_core.contract.verifier_files import (
    VerifierFiles,
    config_fingerprint,
    read_verifier_files,
    tokenizer_fingerprint,
)
from eagle3_core.data.conversations import TokenRow
from eagle3_core.data.prepared import load_prepared
from eagle3_core.data.store import DTYPES, StoreMeta, StoreWriter
from eagle3_core.errors import BadInput
from worker.context import StageContext, StageResult
from worker.device import pick_device
from worker.hugging_face import capture_states, load_model
from worker.progress import Progress


def default_aux_layer_ids(num_hidden_layers: int) -> tuple[int, ...]:
    """The layers EAGLE-3 reads by default: early, middle, late.

    Raises:
        BadInput: the verifier has too few layers for three distinct ids.
    """
    ids = (2, num_hidden_layers // 2, num_hidden_layers - 3)
    if not ids[0] < ids[1] < ids[2]:
        raise BadInput(
            f"a verifier of {num_hidden_layers} layers is too shallow for the default aux_layer_ids {list(ids)}; "
            "give aux_layer_ids"
        )
    return ids


def run(context: StageContext) -> StageResult:
    """Run the verifier over every row and store what enters the wanted layers."""
    params = context.params
    assert isinstance(params, ExtractParams)
    files = read_verifier_files(Path(params.verifier))
    for code, message in files.warnings:
        context.warn(code, message)
    aux_ids = _aux_layer_ids(params, files)
    manifest, rows = load_prepared(Path(params.prepared_dir))
    if manifest.tokenizer_fingerprint != tokenizer_fingerprint(Path(params.verifier)):
        raise BadInput(
            f"{params.prepared_dir} was prepared with the tokenizer of {manifest.verifier}, which is not that of "
            f"{params.verifier}; prepare again with this verifier"
        )

    context.phase("loading")
    device = pick_device(params.device)
    model = load_model(Path(params.verifier), device, DTYPES[params.dtype])
    meta = StoreMeta(
        verifier=params.verifier,
        config_fingerprint=config_fingerprint(Path(params.verifier)),
        tokenizer_fingerprint=manifest.tokenizer_fingerprint,
        hidden_size=files.hidden_size,
        num_hidden_layers=files.num_hidden_layers,
        vocab_size=files.vocab_size,
        layer_ids=aux_ids,
        last_layer_id=files.num_hidden_layers,
        dtype=params.store_dtype,
    )
    per_token = (len(aux_ids) + 1) * files.hidden_size * DTYPES[params.store_dtype].itemsize
    context.report(
        "extract",
        f"states entering layers {list(aux_ids)} and the last state ({files.num_hidden_layers}, before the final "
        f"norm) of {manifest.tokens} tokens: {manifest.tokens * per_token / 1e6:.0f} MB",
        aux_layer_ids=list(aux_ids),
        rows=len(rows),
        tokens=manifest.tokens,
        bytes=manifest.tokens * per_token,
    )

    context.phase("extracting")
    writer = StoreWriter(context.output_dir, meta, params.shard_mb * 1_000_000)
    progress = Progress(context, len(rows), "rows")
    layer_ids = (*aux_ids, files.num_hidden_layers)
    with torch.inference_mode(), capture_states(model, layer_ids) as states:
        for batch in length_batches([len(row.token_ids_T) for row in rows], params.batch_tokens):
            context.check_stop()
            _forward(model, [rows[index] for index in batch], device)
            stacked = torch.stack([states[layer_id] for layer_id in layer_ids], dim=2).cpu()
            for slot, index in enumerate(batch):
                row = rows[index]
                length = len(row.token_ids_T)
                writer.add(index, row.prompt, row.token_ids_T, row.loss_mask_T, stacked[slot, :length])
                progress.step(length)
    store = writer.finish()
    data = {
        "rows": len(rows),
        "tokens": manifest.tokens,
        "shards": len(store.shards),
        "bytes": sum(shard.bytes for shard in store.shards),
        "aux_layer_ids": list(aux_ids),
    }
    return StageResult(data, {"store": str(context.output_dir)})


def _aux_layer_ids(params: ExtractParams, files: VerifierFiles) -> tuple[int, ...]:
    ids = params.aux_layer_ids or default_aux_layer_ids(files.num_hidden_layers)
    if list(ids) != sorted(set(ids)) or ids[0] < 0 or ids[-1] > files.num_hidden_layers:
        raise BadInput(
            f"aux_layer_ids {list(ids)} must ascend without repeats within 0..{files.num_hidden_layers}; "
            "id k is the state entering layer k"
        )
    return ids


def length_batches(lengths: list[int], batch_tokens: int) -> Iterator[list[int]]:
    """Row numbers in batches of similar length, the longest first; padded size at most `batch_tokens`, one row at
    least. Longest first, so that memory runs out at once or never.
    """
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        if batch and lengths[batch[0]] * (len(batch) + 1) > batch_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def _forward(model: torch.nn.Module, rows: list[TokenRow], device: torch.device) -> None:
    """One forward pass over rows padded on the right; causal attention keeps the padding out of every real token."""
    width = max(len(row.token_ids_T) for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    mask = torch.zeros(len(rows), width, dtype=torch.int64)
    for slot, row in enumerate(rows):
        ids[slot, : len(row.token_ids_T)] = row.token_ids_T
        mask[slot, : len(row.token_ids_T)] = 1
    model(input_ids=ids.to(device), attention_mask=mask.to(device), use_cache=False, logits_to_keep=1)
