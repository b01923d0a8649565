"""extract: prepared rows -> a store of the verifier's aux and last hidden states."""

from collections.abc import Iterator
from pathlib import Path

import torch

from eagle3_core.contract.agreement import check_prepared, chosen_layers
from eagle3_core.contract.params import ExtractParams
from eagle3_core.contract.prepared_files import PreparedManifest
from eagle3_core.contract.store_files import StoreMeta
from eagle3_core.contract.verifier_files import (
    VerifierFiles,
    config_fingerprint,
    read_verifier_files,
)
from eagle3_core.data.conversations import TokenRow
from eagle3_core.data.prepared import load_prepared
from eagle3_core.data.store import DTYPES, StoreWriter
from eagle3_core.errors import BadInput
from eagle3_core.training.setup import make_target_head
from eagle3_core.verifier.tensors import load_verifier_weights
from worker.context import StageContext, StageResult
from worker.device import pick_device
from worker.hugging_face import capture_states, load_model
from worker.progress import Progress
from worker.remote_code import report_code

CHECKED_LOGITS = 512
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.03}
"""By dtype of the state, relative to the norm of the logits; bfloat16 alone is off by 0.003."""


def run(context: StageContext) -> StageResult:
    """Run the verifier over every row and store what enters the wanted layers."""
    params = context.params
    assert isinstance(params, ExtractParams)
    files = read_verifier_files(Path(params.verifier))
    for code, message in files.warnings:
        context.warn(code, message)
    aux_ids = chosen_layers(params, files)
    manifest, rows = _read_rows(params, files)
    context.phase("loading")
    device = pick_device(params.device)
    if params.allow_remote_code:
        report_code(context, Path(params.verifier))
    model = load_model(Path(params.verifier), device, DTYPES[params.dtype], params.allow_remote_code)
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
            logits = _forward(model, [rows[index] for index in batch], device)
            if not progress.done:
                check_targets(files, states[files.num_hidden_layers][:, -1], logits)
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


def _read_rows(params: ExtractParams, files: VerifierFiles) -> tuple[PreparedManifest, list[TokenRow]]:
    """The prepared rows, if they are this verifier's and not too long for it."""
    manifest, rows = load_prepared(Path(params.prepared_dir))
    check_prepared(params, files, manifest, max(len(row.token_ids_T) for row in rows))
    return manifest, rows


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


def _forward(model: torch.nn.Module, rows: list[TokenRow], device: torch.device) -> torch.Tensor:
    """One forward pass over rows padded on the right; causal attention keeps the padding out of every real token.

    Returns:
        The logits [B, V] behind the last column, padding or not.
    """
    width = max(len(row.token_ids_T) for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    mask = torch.zeros(len(rows), width, dtype=torch.int64)
    for slot, row in enumerate(rows):
        ids[slot, : len(row.token_ids_T)] = row.token_ids_T
        mask[slot, : len(row.token_ids_T)] = 1
    output = model(input_ids=ids.to(device), attention_mask=mask.to(device), use_cache=False, logits_to_keep=1)
    logits: torch.Tensor = output.logits[:, -1]
    return logits


def check_targets(files: VerifierFiles, last: torch.Tensor, logits: torch.Tensor) -> None:
    """See that norm and head as training reads them give the verifier's own logits.

    Args:
        files: the verifier.
        last: [B, H] states entering the final norm.
        logits: [B, V], what the verifier made of them.

    Raises:
        BadInput: they do not, so a drafter would learn from wrong targets.
    """
    if any(code == "tied_head_differs" for code, _ in files.warnings):
        return  # which of two heads counts was said already, and transformers takes the other one
    rows = torch.arange(0, files.vocab_size, max(1, files.vocab_size // CHECKED_LOGITS))
    head = make_target_head(load_verifier_weights(files, rows, with_embedding=False), "pre_norm", torch.device("cpu"))
    theirs = logits[:, rows.to(logits.device)].cpu().float()
    off = float((head(last.cpu()) - theirs).norm() / theirs.norm())
    if off >= TOLERANCE[last.dtype]:
        raise BadInput(
            f"{files.path}: norm and head ({files.final_norm.name}, {files.head.name}) do not give the logits of the "
            f"verifier itself, they are {off:.0%} off: model_type {files.model_type!r} computes its last layer in a "
            "way that is not known here, and a drafter would learn wrong targets"
        )
