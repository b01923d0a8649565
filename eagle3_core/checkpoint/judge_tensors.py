"""The judge on config and tensors: names, shapes, dtypes.

A aux states, H hidden, D draft vocabulary, V verifier vocabulary.
"""

from collections.abc import Collection
from pathlib import Path

from eagle3_core.checkpoint.findings import Report
from eagle3_core.checkpoint.weights import DrafterWeights, Entry
from eagle3_core.contract.drafter_config import expected_tensors
from eagle3_core.contract.drafter_files import DrafterSource
from eagle3_core.contract.tensor_names import QUANTISED_SUFFIXES

FLOATS = frozenset({"F64", "F32", "F16", "BF16"})

_KINDS = {"float": FLOATS, "int64": frozenset({"I64"}), "bool": frozenset({"BOOL"})}
_FLAG_TENSORS = (
    ("input_norm.", "norm_before_fc"),
    ("fc_norm.", "fc_norm"),
)


def check_config(report: Report, directory: Path, source: DrafterSource, weights: DrafterWeights) -> None:
    """What config.json says on its own, and about the width of fc."""
    file = directory / "config.json"
    report.add("config_note", f"read as {source.format}", file=file)
    for reason in source.unjudged:
        report.add("unsupported_part", f"config.json: {reason}", file=file)
    for fault in source.faults:
        report.add("bad_config", fault, file=file)
    for note in source.notes:
        speculators = source.format == "speculators"
        if note.startswith("norm_before_residual is not stated") and speculators:
            report.add("flag_not_stated", note, file=file)
        elif note.startswith("speculators 0.3"):
            report.add("aux_ids_off_by_one", note, file=file)
        elif "layer_ids is not stated" in note:
            report.add("aux_ids_not_stated", note, file=file)
        else:
            report.add("config_note", note, file=file)
    plain = all(entry.dtype in FLOATS for name, entry in weights.entries.items() if name not in ("d2t", "t2d"))
    places = [source.raw, source.raw.get("transformer_layer_config")]
    if plain and any(isinstance(place, dict) and place.get("quantization_config") is not None for place in places):
        report.add("quantised_config", "quantization_config is there, yet no tensor is quantised", file=file)
    if source.tied and source.config.draft_vocab_size != source.config.vocab_size:
        report.add(
            "tied_head",
            f"tie_word_embeddings is true, yet draft_vocab_size {source.config.draft_vocab_size} differs from "
            f"vocab_size {source.config.vocab_size}: the head cannot be the embedding",
            file=file,
        )
    elif source.tied and "lm_head.weight" in weights.entries:
        what = "tie_word_embeddings is true, yet lm_head.weight is stored: SGLang takes the embedding for it"
        report.add("tied_head", what, file=file)
    _check_aux_ids(report, file, source, weights)


def _check_aux_ids(report: Report, file: Path, source: DrafterSource, weights: DrafterWeights) -> None:
    ids = source.config.aux_layer_ids
    width = source.target_hidden_size or source.config.hidden_size
    fc = weights.entries.get("fc.weight")
    columns = fc.shape[1] if fc is not None and len(fc.shape) == 2 else None
    count = len(ids) if ids is not None else 3
    if columns is not None and columns != count * width:
        said = (
            f"{count} layer ids {list(ids)} (eagle_aux_hidden_state_layer_ids)"
            if ids is not None
            else "no layer ids, so servers take 3"
        )
        key = "target_hidden_size" if source.target_hidden_size else "hidden_size"
        fitting = [f"{columns // width} states"] if columns % width == 0 else []
        if columns % count == 0 and columns // count > width:
            fitting.append(f"target_hidden_size {columns // count}")
        fits = f"; {' or '.join(fitting)} would fit" if fitting else ""
        report.add(
            "aux_id_count",
            f"fc.weight takes {columns} columns, but config.json gives {said} x {key} {width} = {count * width}{fits}",
            file=file,
            tensor="fc.weight",
        )
    if ids is None:
        return
    if len(set(ids)) != len(ids):
        report.add("aux_ids_twice", f"eagle_aux_hidden_state_layer_ids {list(ids)} names a layer twice", file=file)
    elif list(ids) != sorted(ids):
        report.add("aux_ids_not_ascending", f"eagle_aux_hidden_state_layer_ids {list(ids)} do not ascend", file=file)


def check_names(report: Report, directory: Path, source: DrafterSource, weights: DrafterWeights) -> set[str]:
    """Every expected tensor with its shape and dtype class, and no other; returns the names that are sound."""
    expected = expected_of(source)
    sound: set[str] = set()
    if wrapper := _wrapper(weights):
        what = f"every name begins with {wrapper!r}, as a wrapper of training leaves it: save the module inside of it"
        report.add("unexpected_tensor", what, file=weights.files[0])
        return sound
    quantised = _quantised(expected, weights)
    for name, (part, scheme) in quantised.items():
        file = weights.entries[part].file
        report.add("dtype_differs", f"{name} is quantised ({scheme}): {part} is there", file=file, tensor=name)
    parts = {f"{name.removesuffix('.weight')}{suffix}" for name in quantised for suffix, _ in QUANTISED_SUFFIXES}
    for name, (shape, kind) in expected.items():
        entry = weights.entries.get(name)
        if name in quantised:
            continue
        if entry is None:
            _add_missing(report, directory, source, weights, name)
        elif _check_entry(report, source, name, entry, shape, kind):
            sound.add(name)
    for name in sorted(weights.entries.keys() - expected.keys() - parts):
        _add_unexpected(report, source, name, weights.entries[name])
    return sound


def _wrapper(weights: DrafterWeights) -> str | None:
    """What stands before every name and belongs to none, such as `module.` of DistributedDataParallel."""
    outer = next((name.removesuffix("fc.weight") for name in weights.entries if name.endswith(".fc.weight")), None)
    return outer if outer is not None and all(name.startswith(outer) for name in weights.entries) else None


def _quantised(expected: Collection[str], weights: DrafterWeights) -> dict[str, tuple[str, str]]:
    """Expected tensors beside or instead of which the parts of a quantised one lie: name -> (a part, the scheme)."""
    found: dict[str, tuple[str, str]] = {}
    for suffix, scheme in QUANTISED_SUFFIXES:
        for part in weights.entries:
            if part.endswith(suffix) and (name := f"{part.removesuffix(suffix)}.weight") in expected:
                found.setdefault(name, (part, scheme))
    return found


def expected_of(source: DrafterSource) -> dict[str, tuple[tuple[int, ...], str]]:
    """Name -> (shape, kind) of every tensor that belongs to a drafter with this config."""
    config = source.config
    expected = expected_tensors(config)
    target = source.target_hidden_size
    if target is not None and target != config.hidden_size:
        aux = config.num_aux_states * target
        expected["fc.weight"] = ((config.hidden_size, aux), "float")
        if config.norm_before_fc:
            expected["input_norm.weight"] = ((aux,), "float")
        if config.fc_norm:
            expected |= {f"fc_norm.{index}.weight": ((target,), "float") for index in range(config.num_aux_states)}
    if "fc_bias" in source.extras:
        expected["fc.bias"] = ((config.hidden_size,), "float")
    for index in range(config.num_hidden_layers):
        if "mlp_bias" in source.extras:
            rows = {"gate": config.intermediate_size, "up": config.intermediate_size, "down": config.hidden_size}
            expected |= {f"layers.{index}.mlp.{part}_proj.bias": ((size,), "float") for part, size in rows.items()}
    return expected


def _add_missing(report: Report, directory: Path, source: DrafterSource, weights: DrafterWeights, name: str) -> None:
    file = weights.files[0] if len(weights.files) == 1 else directory
    config, speculators = source.config, source.format == "speculators"
    if name == "embed_tokens.weight" and not speculators:
        report.add("embedding_absent", f"{name} is not in the file", file=file, tensor=name)
    elif name == "t2d" and not speculators:
        report.add("t2d_absent", f"{name} is not in the file", file=file, tensor=name)
    elif name == "lm_head.weight" and config.draft_vocab_size == config.vocab_size:
        report.add("head_absent", f"{name} is not in the file; the draft vocabulary is full", file=file, tensor=name)
    elif flag := _flag_of(name):
        report.add(
            "flag_without_tensor", f"config.json says {flag}: true, but {name} is missing", file=file, tensor=name
        )
    else:
        why = ""
        if name in ("d2t", "t2d", "lm_head.weight"):
            why = f": draft_vocab_size {config.draft_vocab_size} is smaller than vocab_size {config.vocab_size}"
        elif config.num_hidden_layers > 1 and name.startswith("layers.") and not name.startswith("layers.0."):
            why = f": num_hidden_layers is {config.num_hidden_layers}"
        report.add("missing_tensor", f"{name} is missing{why}", file=file, tensor=name)


def _add_unexpected(report: Report, source: DrafterSource, name: str, entry: Entry) -> None:
    stored = name if entry.stored_name == name else f"{entry.stored_name} ({name})"
    flag = _flag_of(name)
    if flag is not None:
        report.add(
            "tensor_without_flag",
            f"{stored} is in the file, but config.json does not say {flag}: true",
            file=entry.file,
            tensor=name,
        )
        return
    why = " (the draft vocabulary is full, so there is nothing to map)" if name in ("d2t", "t2d") else ""
    report.add(
        "unexpected_tensor",
        f"{stored} {list(entry.shape)} belongs to no such drafter{why}",
        file=entry.file,
        tensor=name,
    )


def _flag_of(name: str) -> str | None:
    """The config key without which servers ignore a tensor."""
    if name == "fc.bias":
        return "fc_bias"
    if name.endswith("_proj.bias"):
        return "mlp_bias" if ".mlp." in name else "attention_bias"
    return next((flag for prefix, flag in _FLAG_TENSORS if name.startswith(prefix)), None)


def _check_entry(
    report: Report, source: DrafterSource, name: str, entry: Entry, shape: tuple[int, ...], kind: str
) -> bool:
    sound = True
    if entry.shape != shape:
        sound = False
        code = "map_length" if name in ("d2t", "t2d") and len(entry.shape) == 1 else "shape_differs"
        report.add(
            code,
            f"{name} has shape {list(entry.shape)}, expected {list(shape)} from {_keys(name, source)}",
            file=entry.file,
            tensor=name,
        )
    if entry.dtype not in _KINDS[kind]:
        sound = False
        report.add("dtype_differs", f"{name} is {entry.dtype}, expected {kind}", file=entry.file, tensor=name)
    return sound


def _keys(name: str, source: DrafterSource) -> str:
    """The config keys a shape follows from."""
    config = source.config
    hidden, heads, kv = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
    part = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
    known = {
        "embed_tokens": f"vocab_size {config.vocab_size}, hidden_size {hidden}",
        "lm_head": f"draft_vocab_size {config.draft_vocab_size}, hidden_size {hidden}",
        "fc": f"hidden_size {hidden} and {config.num_aux_states} aux states (num_aux_hidden_states, or the layer ids)",
        "q_proj": f"num_attention_heads {heads} x head_dim {config.head_dim}, hidden_size {hidden}",
        "o_proj": f"num_attention_heads {heads} x head_dim {config.head_dim}, hidden_size {hidden}",
        "k_proj": f"num_key_value_heads {kv} x head_dim {config.head_dim}, hidden_size {hidden}",
        "v_proj": f"num_key_value_heads {kv} x head_dim {config.head_dim}, hidden_size {hidden}",
        "gate_proj": f"intermediate_size {config.intermediate_size}, hidden_size {hidden}",
        "up_proj": f"intermediate_size {config.intermediate_size}, hidden_size {hidden}",
        "down_proj": f"intermediate_size {config.intermediate_size}, hidden_size {hidden}",
        "q_norm": f"head_dim {config.head_dim}",
        "k_norm": f"head_dim {config.head_dim}",
        "d2t": f"draft_vocab_size {config.draft_vocab_size}, which lm_head.weight has a row for each of",
        "t2d": f"vocab_size {config.vocab_size}",
    }
    if config.mla is not None and ".self_attn." in name:
        sizes = ", ".join(f"{key} {value}" for key, value in config.mla)
        return f"num_attention_heads {heads}, hidden_size {hidden}, {sizes}"
    return known.get(part, f"hidden_size {hidden}")
