"""extract: prepared rows -> a store of the verifier's aux and last hidden states."""

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
from eagle3_core.data.store import DTYPES
from eagle3_core.data.store_writer import UnfinishedStore
from eagle3_core.errors import BadData, BadInput
from eagle3_core.training.setup import make_target_head
from eagle3_core.verifier.tensors import load_verifier_weights, output_fingerprint
from worker.context import StageContext, StageResult
from worker.device import pick_device
from worker.extraction import Batch, Extraction, plan_shards
from worker.hugging_face import capture_states, load_model
from worker.progress import Progress
from worker.remote_code import report_code
from worker.states import StateReader
from worker.verification import Recomputation

CHECKED_LOGITS = 512
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.03}
"""By dtype of the state, relative to the norm of the logits; bfloat16 alone is off by 0.003."""


def run(context: StageContext) -> StageResult:
    """Run the verifier over every row that is not stored yet, and store what enters the wanted layers."""
    params = context.params
    assert isinstance(params, ExtractParams)
    files = read_verifier_files(Path(params.verifier))
    for code, message in files.warnings:
        context.warn(code, message)
    manifest, rows = _read_rows(params, files)
    meta = _describe(params, files, manifest)
    per_token = _report(context, meta, manifest.tokens, len(rows))
    lengths = [len(row.token_ids_T) for row in rows]
    plan = plan_shards(lengths, params.batch_tokens, params.shard_mb * 1_000_000 // per_token)
    context.phase("checking")
    planned = [[(row, rows[row]) for batch in shard for row in batch] for shard in plan]
    store = UnfinishedStore(context.output_dir, meta, planned, context.check_stop)
    _report_what_is_there(context, store, len(plan))
    context.phase("loading")
    device = pick_device(params.device)
    if params.allow_remote_code:
        report_code(context, Path(params.verifier))
    dtype = DTYPES[params.dtype]
    model = load_model(Path(params.verifier), device, dtype, params.allow_remote_code, params.device_map)
    _warn_of_offloading(context, model, device)
    check_logits(files, model, rows[plan[0][0][0]].token_ids_T.to(device))
    reader = StateReader(model, (*meta.layer_ids, meta.last_layer_id), device)
    again = Recomputation(model, reader, meta, params.dtype)

    context.phase("extracting")
    missing = [(number, plan[number]) for number in store.missing]
    left = sum(len(batch) for _, shard in missing for batch in shard)
    progress = Progress(context, len(rows), "rows", done=len(rows) - left)

    def on_batch(batch: Batch) -> None:
        for row in batch:
            progress.step(lengths[row])
        context.check_stop()

    with Extraction(reader, store, meta, rows, dtype) as extraction:
        if params.verify_rows and missing:  # a fault in all rows shall not come out after the last one
            extraction.run(dict(missing[:1]), on_batch)
            stored = store.so_far()
            again.compare(stored, [len(stored) - 1])
        extraction.run({number: plan[number] for number in store.missing}, on_batch)
    return _finish(context, params, store, again, manifest.tokens)


def _describe(params: ExtractParams, files: VerifierFiles, manifest: PreparedManifest) -> StoreMeta:
    """What the states of the store will be."""
    return StoreMeta(
        verifier=params.verifier,
        config_fingerprint=config_fingerprint(Path(params.verifier)),
        output_fingerprint=output_fingerprint(files),
        tokenizer_fingerprint=manifest.tokenizer_fingerprint,
        hidden_size=files.hidden_size,
        num_hidden_layers=files.num_hidden_layers,
        vocab_size=files.vocab_size,
        layer_ids=chosen_layers(params, files),
        last_layer_id=files.num_hidden_layers,
        dtype=params.store_dtype,
    )


def _report(context: StageContext, meta: StoreMeta, tokens: int, rows: int) -> int:
    """Say what will be stored; returns the bytes that the states of a token take."""
    scale = torch.float32.itemsize if meta.dtype == "float8_e4m3" else 0
    per_token = (len(meta.layer_ids) + 1) * (meta.hidden_size * DTYPES[meta.dtype].itemsize + scale)
    context.report(
        "extract",
        f"states entering layers {list(meta.layer_ids)} and the last state ({meta.last_layer_id}, before the final "
        f"norm) of {tokens} tokens: {tokens * per_token / 1e6:.0f} MB",
        aux_layer_ids=list(meta.layer_ids),
        rows=rows,
        tokens=tokens,
        bytes=tokens * per_token,
    )
    return per_token


def _report_what_is_there(context: StageContext, store: UnfinishedStore, shards: int) -> None:
    """Say which shards an earlier attempt left, and which of them do not count."""
    for why in store.redone:
        context.warn("shard_redone", why)
    if there := shards - len(store.missing):
        context.report("resumed", f"{there} of {shards} shards are there", shards=shards, shards_there=there)


def _warn_of_offloading(context: StageContext, model: torch.nn.Module, device: torch.device) -> None:
    """Layers that device_map left in main memory or on disk are brought over for each batch."""
    places: dict[str, object] = getattr(model, "hf_device_map", {})
    off = [name for name, place in places.items() if place in ("cpu", "disk")]
    if off and device.type == "cuda":
        context.warn(
            "verifier_offloaded",
            f"{len(off)} of {len(places)} parts of the verifier find no room on the job's GPUs and are brought over "
            f"for each batch, which is slow: {', '.join(off[:3])}; ask for more gpus",
        )


def _finish(
    context: StageContext, params: ExtractParams, store: UnfinishedStore, again: Recomputation, tokens: int
) -> StageResult:
    """Compare some rows with a second computation, and write the index."""
    verified = None
    if params.verify_rows:
        context.phase("verifying")
        stored = store.so_far()
        last = len(stored) - 1
        count = min(params.verify_rows, len(stored))
        numbers = sorted({round(part * last / max(1, count - 1)) for part in range(count)})
        verified = again.compare(stored, numbers)
        context.report(
            "verified",
            f"{verified.rows} rows computed once more ({verified.way}): states differ by {verified.worst:.2%} at most, "
            f"{verified.tolerance:.2%} are allowed",
            **vars(verified),
        )
    index = store.finish()
    data = {
        "rows": sum(len(shard.rows) for shard in index.shards),
        "tokens": tokens,
        "shards": len(index.shards),
        "bytes": sum(shard.bytes for shard in index.shards),
        "aux_layer_ids": list(index.meta.layer_ids),
        "verified": verified and vars(verified),
    }
    return StageResult(data, {"store": str(context.output_dir)})


def _read_rows(params: ExtractParams, files: VerifierFiles) -> tuple[PreparedManifest, list[TokenRow]]:
    """The prepared rows, if they are this verifier's, not too long for it, and something of them is trained on."""
    manifest, rows = load_prepared(Path(params.prepared_dir))
    check_prepared(params, files, manifest, max(len(row.token_ids_T) for row in rows))
    for number, row in enumerate(rows):
        low, high = int(row.token_ids_T.min()), int(row.token_ids_T.max())
        if not 0 <= low <= high < files.vocab_size:
            raise BadData(
                f"{params.prepared_dir}, row {number}: token ids from {low} to {high}, the verifier has "
                f"{files.vocab_size} tokens; prepare again"
            )
    if not any(bool(row.loss_mask_T.any()) for row in rows):
        raise BadData(f"{params.prepared_dir}: not a token of its {len(rows)} rows is trained on; prepare again")
    return manifest, rows


def check_logits(files: VerifierFiles, model: torch.nn.Module, token_ids: torch.Tensor) -> None:
    """`check_targets` on one row.

    Raises:
        BadInput: as there.
    """
    last = files.num_hidden_layers
    with torch.inference_mode(), capture_states(model, (last,)) as states:
        logits = model(input_ids=token_ids[None], use_cache=False, logits_to_keep=1).logits
        check_targets(files, states[last][:, -1], logits[:, -1])


def check_targets(files: VerifierFiles, last: torch.Tensor, logits: torch.Tensor) -> None:
    """See that norm and head as training reads them give the verifier's own logits.

    Args:
        files: the verifier.
        last: [B, H] states entering the final norm.
        logits: [B, V], what the verifier made of them.

    Raises:
        BadInput: they do not, or are no numbers, so a drafter would learn from wrong targets.
    """
    if not bool(last.isfinite().all()):
        return  # where all states are looked at, row and layer are named
    wrong = (logits.isnan() | (logits == torch.inf)).any(dim=0).nonzero()[:, 0].tolist()
    if wrong:
        raise BadInput(
            f"{files.path}: the verifier's logits are NaN or Inf for {len(wrong)} tokens, the first is token "
            f"{wrong[0]}, though its last states are finite: {files.head.name} or {files.final_norm.name} is damaged"
        )
    if any(code == "tied_head_differs" for code, _ in files.warnings):
        return  # which of two heads counts was said already, and transformers takes the other one
    rows = torch.arange(0, files.vocab_size, max(1, files.vocab_size // CHECKED_LOGITS))
    head = make_target_head(load_verifier_weights(files, rows, with_embedding=False), "pre_norm", torch.device("cpu"))
    theirs = logits[:, rows.to(logits.device)].cpu().float()
    off = float((head(last.cpu()) - theirs).norm() / theirs.norm())
    if not off < TOLERANCE[last.dtype]:
        raise BadInput(
            f"{files.path}: norm and head ({files.final_norm.name}, {files.head.name}) do not give the logits of the "
            f"verifier itself, they are {off:.0%} off: model_type {files.model_type!r} computes its last layer in a "
            "way that is not known here, and a drafter would learn wrong targets"
        )
