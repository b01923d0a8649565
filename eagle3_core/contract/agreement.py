"""What request, verifier, data and drafter must agree on, as far as configs, indexes and sizes tell. No tensor is read.

Stages check it before they work, and the server when a job is submitted.
"""

from typing import Any

from eagle3_core.contract.drafter_files import DrafterSource
from eagle3_core.contract.params import ExtractParams, TrainParams
from eagle3_core.contract.prepared_files import PreparedManifest
from eagle3_core.contract.store_files import StoreMeta
from eagle3_core.contract.verifier_files import VerifierFiles, tokenizer_fingerprint
from eagle3_core.errors import BadInput

SHAPE_FIELDS = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
FLAG_FIELDS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "qk_norm")
ASKABLE = (*SHAPE_FIELDS, *FLAG_FIELDS, "num_hidden_layers", "sliding_window")
CONFIG_FIELDS = ("rope", "rms_norm_eps", "max_position_embeddings", "attention_bias", "hidden_act", "mla")


def default_aux_layer_ids(num_hidden_layers: int) -> tuple[int, ...]:
    """The layers EAGLE-3 reads by default: early, middle, late.

    Raises:
        BadInput: the verifier has too few layers for three distinct ids.
    """
    ids = (2, num_hidden_layers // 2, num_hidden_layers - 3)
    if not ids[0] < ids[1] < ids[2]:
        raise BadInput(
            f"a verifier of {num_hidden_layers} layers is too shallow for the default aux_layer_ids {list(ids)}; give "
            f"aux_layer_ids that ascend within 0..{num_hidden_layers}, such as "
            f"{sorted({0, num_hidden_layers // 2, num_hidden_layers - 1})}"
        )
    return ids


def chosen_layers(params: ExtractParams, files: VerifierFiles) -> tuple[int, ...]:
    """The aux layers an extraction captures: those asked for, else the default.

    Raises:
        BadInput: the verifier has no such layers, or they do not ascend.
    """
    ids = params.aux_layer_ids or default_aux_layer_ids(files.num_hidden_layers)
    if list(ids) != sorted(set(ids)) or ids[0] < 0 or ids[-1] > files.num_hidden_layers:
        raise BadInput(
            f"aux_layer_ids {list(ids)} must ascend without repeats within 0..{files.num_hidden_layers}; "
            "id k is the state entering layer k"
        )
    return ids


def check_prepared(params: ExtractParams, files: VerifierFiles, manifest: PreparedManifest, longest: int) -> None:
    """Refuse rows of another tokenizer, or longer than the verifier is made for.

    Args:
        params: the request.
        files: the verifier.
        manifest: of the prepared directory.
        longest: tokens of the longest row.

    Raises:
        BadInput: names both.
    """
    if manifest.tokenizer_fingerprint != tokenizer_fingerprint(files.path):
        raise BadInput(
            f"{params.prepared_dir} was prepared with the tokenizer of {manifest.verifier}, which is not that of "
            f"{params.verifier}; prepare again with this verifier"
        )
    if longest > files.max_position_embeddings:
        raise BadInput(
            f"{params.prepared_dir} holds a row of {longest} tokens, the verifier {params.verifier} is made for "
            f"{files.max_position_embeddings}; prepare again with a lower max_seq_len"
        )


def check_store(params: TrainParams, files: VerifierFiles, meta: StoreMeta) -> None:
    """Refuse states of another verifier, or whose last one is no target.

    Raises:
        BadInput: names both.
    """
    if meta.hidden_size != files.hidden_size:
        raise BadInput(
            f"data_dir holds states of hidden size {meta.hidden_size} ({meta.verifier}), the verifier "
            f"{params.verifier} has {files.hidden_size}"
        )
    for name in ("vocab_size", "num_hidden_layers"):
        if dict(meta)[name] != vars(files)[name]:
            raise BadInput(
                f"data_dir was extracted from {meta.verifier} with {name} {dict(meta)[name]}, the verifier "
                f"{params.verifier} has {vars(files)[name]}"
            )
    if meta.last_layer_id != meta.num_hidden_layers:
        raise BadInput(
            f"data_dir {params.data_dir} holds the state entering layer {meta.last_layer_id} as the last one, targets "
            f"come from the one behind the last layer ({meta.num_hidden_layers}); extract again"
        )


def check_layers(params: TrainParams, meta: StoreMeta) -> None:
    """Refuse states of other layers than were asked for.

    Raises:
        BadInput: names both.
    """
    if params.aux_layer_ids is not None and params.aux_layer_ids != meta.layer_ids:
        raise BadInput(
            f"aux_layer_ids {list(params.aux_layer_ids)} were asked for, data_dir {params.data_dir} holds the states "
            f"entering layers {list(meta.layer_ids)}; extract again, or leave aux_layer_ids out"
        )


def shape_of_source(
    params: TrainParams, meta: StoreMeta, source: DrafterSource, overrides: list[str]
) -> dict[str, Any]:
    """What the source checkpoint decides; contradictions are errors, or become overrides.

    Args:
        params: the request.
        meta: of the store.
        source: the checkpoint's config.
        overrides: what was overridden is added here.

    Raises:
        BadInput: names the checkpoint and what contradicts it.
    """
    asked, config = dict(params), source.config
    where = f"finetune_from {params.finetune_from}"
    if config.hidden_size != meta.hidden_size:
        raise BadInput(f"{where} has hidden size {config.hidden_size}, the verifier's states have {meta.hidden_size}")
    if config.num_aux_states != len(meta.layer_ids):
        raise BadInput(
            f"{where} fuses {config.num_aux_states} aux states, data_dir holds {len(meta.layer_ids)} a token "
            f"({list(meta.layer_ids)})"
        )
    for name in (*SHAPE_FIELDS, "num_hidden_layers"):
        if asked[name] is not None and asked[name] != dict(config)[name]:
            raise BadInput(f"{name} {asked[name]} was asked for, {where} has {dict(config)[name]}; leave {name} out")
    taken = {name: dict(config)[name] for name in (*SHAPE_FIELDS, *FLAG_FIELDS)}
    mismatches = [
        (f"{name} {asked[name]} was asked for, {where} was made with {taken[name]}", name)
        for name in FLAG_FIELDS
        if asked[name] is not None and asked[name] != taken[name]
    ]
    if text := _other_states(params, meta, source):
        mismatches.append((text, ""))
    if config.vocab_size != meta.vocab_size:
        mismatches.append(
            (f"{where} was made for {config.vocab_size} verifier tokens, {meta.verifier} has {meta.vocab_size}", "")
        )
    if mismatches and not params.allow_source_mismatch:
        raise BadInput(
            "; ".join(text for text, _ in mismatches)
            + ". A drafter fed other states, or computed in another way, than it learned has to learn anew: extract "
            "or ask for what it was made with, or set allow_source_mismatch"
        )
    for text, name in mismatches:
        overrides.append(text)
        if name:
            taken[name] = asked[name]
    return taken | {
        **{name: dict(config)[name] for name in CONFIG_FIELDS},
        "num_hidden_layers": config.num_hidden_layers,
        "sliding_window": config.sliding_window if params.sliding_window is None else params.sliding_window,
    }


def _other_states(params: TrainParams, meta: StoreMeta, source: DrafterSource) -> str | None:
    """What to say where the source learned on other states than the store holds, as far as it tells."""
    made_for, how = source.config.aux_layer_ids, ""
    if made_for is None and source.captured_after:
        last = meta.num_hidden_layers
        made_for, how = (3, last // 2 + 1, last - 2), " (the default of speculators 0.3, which writes no ids)"
    if made_for is None or made_for == meta.layer_ids:
        return None
    return (
        f"data_dir {params.data_dir} holds the states entering layers {list(meta.layer_ids)}, finetune_from "
        f"{params.finetune_from} was made for those entering {list(made_for)}{how}"
    )


def check_map(params: TrainParams, files: VerifierFiles, draft_size: int, vocab_size: int) -> None:
    """Refuse a vocabulary map of another size than the verifier or the request has.

    Raises:
        BadInput: names both.
    """
    if vocab_size != files.vocab_size:
        raise BadInput(
            f"the vocabulary map is for {vocab_size} verifier tokens, {params.verifier} has "
            f"{files.vocab_size}; prepare again with this verifier"
        )
    if params.draft_vocab_size is not None and params.draft_vocab_size != draft_size:
        raise BadInput(f"draft_vocab_size {params.draft_vocab_size} was asked for, the vocabulary map has {draft_size}")
