"""What a training run starts from: the drafter's shape and weights, and the verifier's word on every row.

A knob of the drafter's shape comes from the checkpoint named by `finetune_from`, else from the request, else from the
file named by `drafter_config`, else from the verifier. Where request or store contradict that checkpoint, the error
names both; with `allow_source_mismatch` the request or the store wins, and what was overridden is recorded in every
checkpoint.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from eagle3_core.checkpoint.format import DrafterSource, read_drafter_config, read_drafter_tensors
from eagle3_core.contract.agreement import (
    ASKABLE,
    CONFIG_FIELDS,
    SHAPE_FIELDS,
    check_layers,
    check_map,
    check_store,
    shape_of_source,
)
from eagle3_core.contract.drafter_config import DrafterConfig
from eagle3_core.contract.params import TrainParams
from eagle3_core.contract.store_files import StoreMeta
from eagle3_core.contract.verifier_files import VerifierFiles
from eagle3_core.errors import BadInput
from eagle3_core.model.drafter import Eagle3Drafter
from eagle3_core.model.rope import longest_text
from eagle3_core.model.vocab_map import VocabMap, load_vocab_map, map_fault, map_of_tokens
from eagle3_core.training.score import TargetHead
from eagle3_core.verifier.tensors import VerifierWeights

INITIALIZER_RANGE = 0.02

Report = Callable[..., None]
"""report(title, text, **data), as `StageContext.report`."""


@dataclass
class Shape:
    """The drafter's config, and each contradiction that was overridden."""

    config: DrafterConfig
    overrides: list[str] = field(default_factory=list)


def resolve_shape(
    params: TrainParams,
    files: VerifierFiles,
    meta: StoreMeta,
    source: DrafterSource | None,
    draft_vocab_size: int,
) -> Shape:
    """The config of the drafter to train.

    Raises:
        BadInput: the request, the store, the verifier or the source checkpoint contradict each other; names both.
    """
    check_store(params, files, meta)
    check_layers(params, meta)
    chosen = _from_verifier(files)
    if params.drafter_config is not None:
        chosen |= _from_file(params.drafter_config, files, meta, draft_vocab_size)
    chosen |= {name: dict(params)[name] for name in ASKABLE if dict(params)[name] is not None}
    overrides: list[str] = []
    if source is not None:
        chosen |= shape_of_source(params, meta, source, overrides)
    _settle_attention(params, files, chosen)
    if chosen.get("norm_before_fc") and chosen.get("fc_norm"):
        raise BadInput("norm_before_fc and fc_norm exclude each other; one comes from the request, one from its source")
    config = DrafterConfig(
        hidden_size=files.hidden_size,
        vocab_size=files.vocab_size,
        draft_vocab_size=draft_vocab_size,
        aux_layer_ids=meta.layer_ids,
        num_aux_states=len(meta.layer_ids),
        bos_token_id=files.bos_token_id,
        eos_token_id=list(files.eos_token_ids),
        own_embedding=params.train_embedding or (source is not None and source.config.own_embedding),
        **chosen,
    )
    if config.num_attention_heads % config.num_key_value_heads:
        raise BadInput(
            f"num_attention_heads {config.num_attention_heads} is not a multiple of num_key_value_heads "
            f"{config.num_key_value_heads}"
        )
    longest = longest_text(config.rope, config.max_position_embeddings)
    if longest is not None and params.max_seq_len > longest:
        raise BadInput(
            f"max_seq_len {params.max_seq_len}: with rope_type {config.rope['rope_type']} positions of texts longer "
            f"than {longest} tokens turn otherwise; ask for max_seq_len {longest}"
        )
    return Shape(config, overrides)


def _from_verifier(files: VerifierFiles) -> dict[str, Any]:
    """What a drafter takes from its verifier where nothing else is said."""
    names = (*SHAPE_FIELDS, "rope", "rms_norm_eps", "max_position_embeddings")
    return {name: vars(files)[name] for name in names}


def _settle_attention(params: TrainParams, files: VerifierFiles, chosen: dict[str, Any]) -> None:
    """Decide between grouped and latent attention, and refuse what the latter does not have."""
    mla = chosen.get("mla")
    if params.finetune_from is not None and params.mla not in (None, mla is not None):
        raise BadInput(
            f"mla {params.mla} was asked for, finetune_from {params.finetune_from} is of the other kind; leave mla out"
        )
    if params.mla and mla is None:
        mla = files.mla
        if mla is None:
            raise BadInput(f"mla was asked for; neither drafter_config nor {params.verifier} says in which sizes")
    chosen["mla"] = mla = mla if params.mla is not False else None
    if mla is None:
        return
    unfit = [name for name in ("norm_before_fc", "qk_norm", "sliding_window", "attention_bias") if chosen.get(name)]
    unfit += [name for name in ("num_key_value_heads", "head_dim") if dict(params)[name] is not None]
    if unfit:
        raise BadInput(f"{', '.join(unfit)}: a drafter with latent attention (mla) has none that servers would load")
    chosen |= {"num_key_value_heads": chosen["num_attention_heads"], "head_dim": mla.qk_head_dim}


def _from_file(path: str, files: VerifierFiles, meta: StoreMeta, draft_vocab_size: int) -> dict[str, Any]:
    """The shape that a drafter's config file states.

    Raises:
        BadInput: it is of another verifier, vocabulary or other states.
        CheckpointError: it cannot be read.
    """
    config = read_drafter_config(Path(path)).config
    # A config that states no draft vocabulary is read as having the whole.
    stated = draft_vocab_size if config.draft_vocab_size == config.vocab_size else config.draft_vocab_size
    for name, theirs, ours in (
        ("hidden_size", config.hidden_size, files.hidden_size),
        ("vocab_size", config.vocab_size, files.vocab_size),
        ("draft_vocab_size", stated, draft_vocab_size),
        ("number of aux states", config.num_aux_states, len(meta.layer_ids)),
        ("aux layers", list(config.aux_layer_ids or meta.layer_ids), list(meta.layer_ids)),
    ):
        if theirs != ours:
            raise BadInput(
                f"drafter_config {path} says {name} {theirs}, verifier, vocabulary map and store have {ours}"
            )
    return {name: dict(config)[name] for name in (*ASKABLE, *CONFIG_FIELDS)}


def choose_vocab_map(params: TrainParams, files: VerifierFiles, source_tensors: dict[str, Tensor] | None) -> VocabMap:
    """The draft vocabulary: the one of vocab_map_dir, else the source checkpoint's.

    Raises:
        BadInput: sizes contradict the verifier or the request, or the source brings no map.
    """
    if params.vocab_map_dir is not None:
        vocab_map = load_vocab_map(Path(params.vocab_map_dir))
    else:
        vocab_map = _map_of_source(params, files.vocab_size, source_tensors or {})
    check_map(params, files, len(vocab_map.d2t_D), len(vocab_map.t2d_V))
    return vocab_map


def _map_of_source(params: TrainParams, vocab_size: int, tensors: dict[str, Tensor]) -> VocabMap:
    """The source's draft vocabulary, in the order of the verifier's tokens whatever order it has there."""
    tokens = torch.arange(vocab_size)
    if "d2t" in tensors:
        if fault := map_fault(tensors["d2t"], tensors.get("t2d"), vocab_size):
            raise BadInput(f"finetune_from {params.finetune_from}: {fault}; give vocab_map_dir")
        tokens = (tensors["d2t"] + torch.arange(len(tensors["d2t"]))).sort().values
    elif "lm_head.weight" not in tensors or len(tensors["lm_head.weight"]) != vocab_size:
        raise BadInput(f"finetune_from {params.finetune_from} holds no d2t and t2d; give vocab_map_dir")
    return map_of_tokens(tokens, torch.zeros(vocab_size, dtype=torch.int64))


def read_source(params: TrainParams) -> tuple[DrafterSource, dict[str, Tensor]] | None:
    """Config and tensors of `finetune_from`, or None.

    Raises:
        CheckpointError: it cannot be read, or contradicts itself.
    """
    if params.finetune_from is None:
        return None
    path = Path(params.finetune_from)
    return read_drafter_config(path), read_drafter_tensors(path)


def build_drafter(
    shape: Shape,
    vocab_map: VocabMap,
    weights: VerifierWeights,
    source: tuple[DrafterSource, dict[str, Tensor]] | None,
    seed: int,
    report: Report,
) -> Eagle3Drafter:
    """The drafter to train, in float32; an embedding that is the verifier's stays in its dtype.

    Args:
        shape: its config.
        vocab_map: its vocabulary.
        weights: verifier embedding, and the head rows of the draft vocabulary.
        source: checkpoint to start from.
        seed: decides the weights of a fresh drafter.
        report: told what was loaded.

    Raises:
        BadInput: a tensor of the source has another shape than its config says.
    """
    torch.manual_seed(seed)
    drafter = Eagle3Drafter(shape.config)
    for module in drafter.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=INITIALIZER_RANGE)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    embedding = weights.embedding
    if shape.config.own_embedding:
        embedding = embedding.to(torch.float32, copy=True)
    drafter.embed_tokens.weight = nn.Parameter(embedding, requires_grad=False)
    with torch.no_grad():
        drafter.lm_head.weight.copy_(weights.head)
    if shape.config.draft_vocab_size != shape.config.vocab_size:
        drafter.d2t.copy_(vocab_map.d2t_D)
        drafter.t2d.copy_(vocab_map.t2d_V)
    if source is not None:
        _load_source(drafter, vocab_map, *source, report)
    return drafter


def _load_source(
    drafter: Eagle3Drafter, vocab_map: VocabMap, source: DrafterSource, tensors: dict[str, Tensor], report: Report
) -> None:
    """Take over every trained tensor; head rows by the verifier token they stand for."""
    parameters = dict(drafter.named_parameters())
    kept = ("t2d", "d2t") if source.config.own_embedding else ("embed_tokens.weight", "t2d", "d2t")
    skipped = [name for name in kept if name in tensors]
    loaded = [name for name in tensors if name in parameters and name not in skipped]
    absent = sorted(set(parameters) - set(tensors) - set(kept))
    unknown = sorted(set(tensors) - set(loaded) - set(skipped))
    if absent or unknown:
        raise BadInput(f"finetune_from: tensors missing: {absent or 'none'}; unknown: {unknown or 'none'}")
    for name in loaded:
        if name == "lm_head.weight":
            continue
        if tensors[name].shape != parameters[name].shape:
            raise BadInput(
                f"finetune_from: {name} has shape {list(tensors[name].shape)}, its config says "
                f"{list(parameters[name].shape)}"
            )
        with torch.no_grad():
            parameters[name].copy_(tensors[name])
    matched = _match_head_rows(drafter, vocab_map, tensors)
    report(
        "finetune_from",
        f"loaded {len(loaded)} tensors, skipped {len(skipped)} ({', '.join(skipped)}); head rows: {matched} of "
        f"{len(vocab_map.d2t_D)} matched by verifier token, the others start from the verifier's head",
        loaded=loaded,
        skipped=skipped,
        head_rows_matched=matched,
    )


def _match_head_rows(drafter: Eagle3Drafter, vocab_map: VocabMap, tensors: dict[str, Tensor]) -> int:
    """Copy the source's head rows of tokens both vocabularies hold; returns how many."""
    head = tensors["lm_head.weight"]
    vocab_size = drafter.config.vocab_size
    if "d2t" not in tensors and len(head) != vocab_size:
        raise BadInput(f"finetune_from: {len(head)} head rows for {vocab_size} verifier tokens, and no d2t beside them")
    d2t = tensors.get("d2t", torch.zeros(len(head), dtype=torch.int64))
    if tuple(head.shape[1:]) != (drafter.config.hidden_size,) or len(d2t) != len(head):
        raise BadInput(f"finetune_from: lm_head.weight {list(head.shape)} and d2t [{len(d2t)}] do not fit")
    if fault := map_fault(d2t, tensors.get("t2d"), vocab_size):
        raise BadInput(f"finetune_from: {fault}, so its head rows have no known meaning")
    source_ids = torch.arange(len(head)) + d2t
    row_of_token = torch.full((vocab_size,), -1, dtype=torch.int64)
    row_of_token[source_ids] = torch.arange(len(head))
    rows = row_of_token[vocab_map.target_ids_D]
    with torch.no_grad():
        drafter.lm_head.weight[rows >= 0] = head[rows[rows >= 0]].float()
    return int((rows >= 0).sum())


def make_target_head(weights: VerifierWeights, last_state: str, device: torch.device) -> TargetHead:
    """The verifier's logits over the draft vocabulary, from its stored last states.

    Args:
        weights: head rows of the draft vocabulary, final norm, soft-cap and scale.
        last_state: `pre_norm` states go through the final norm, `post_norm` ones straight to the head.
        device: where it runs.

    Returns:
        A function of states [R, H] to float32 logits [R, D].
    """
    head_DH = weights.head.to(device, torch.float32)
    gain_H = weights.norm_gain.to(device)

    def logits(states_RH: Tensor) -> Tensor:
        states = states_RH.float()
        if last_state == "pre_norm":
            states = nn.functional.rms_norm(states, gain_H.shape, gain_H, weights.rms_norm_eps)
        with torch.autocast(device.type, enabled=False):
            out = states @ head_DH.T * weights.logit_scale
        cap = weights.final_logit_softcapping
        return out if cap is None else torch.tanh(out / cap) * cap

    return logits
