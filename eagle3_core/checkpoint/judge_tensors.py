"""The judge on config and tensors: names, shapes, dtypes, and every value.

A aux states, H hidden, D draft vocabulary, V verifier vocabulary.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from eagle3_core.checkpoint.findings import Report
from eagle3_core.checkpoint.judge_files import add_unreadable
from eagle3_core.checkpoint.weights import DrafterWeights, Entry
from eagle3_core.contract.drafter_config import DrafterConfig, expected_tensors
from eagle3_core.contract.drafter_files import DrafterSource
from eagle3_core.errors import UnreadableFile

EXTREME = 1e5
"""No weight of a working drafter comes near; one flipped exponent bit passes it."""

_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
_KINDS = {"float": _FLOATS, "int64": frozenset({"I64"}), "bool": frozenset({"BOOL"})}
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
    _check_aux_ids(report, file, source, weights)


def _check_aux_ids(report: Report, file: Path, source: DrafterSource, weights: DrafterWeights) -> None:
    ids = source.config.aux_layer_ids
    width = source.target_hidden_size or source.config.hidden_size
    fc = weights.entries.get("fc.weight")
    columns = fc.shape[1] if fc is not None and len(fc.shape) == 2 else None
    count = len(ids) if ids is not None else 3
    if columns is not None and columns != count * width:
        said = f"{count} layer ids {list(ids)}" if ids is not None else "no layer ids, so servers take 3"
        report.add(
            "aux_id_count",
            f"fc.weight takes {columns} columns, but config.json gives {said} x hidden_size {width} = {count * width}",
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
    expected = _expected(source)
    sound = set()
    for name, (shape, kind) in expected.items():
        entry = weights.entries.get(name)
        if entry is None:
            _add_missing(report, directory, source, weights, name)
        elif _check_entry(report, source, name, entry, shape, kind):
            sound.add(name)
    for name in sorted(weights.entries.keys() - expected.keys()):
        _add_unexpected(report, source, name, weights.entries[name])
    return sound


def _expected(source: DrafterSource) -> dict[str, tuple[tuple[int, ...], str]]:
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
            f"{name} has shape {list(entry.shape)}, expected {list(shape)} from {_keys(name, source.config)}",
            file=entry.file,
            tensor=name,
        )
    if entry.dtype not in _KINDS[kind]:
        sound = False
        report.add("dtype_differs", f"{name} is {entry.dtype}, expected {kind}", file=entry.file, tensor=name)
    return sound


def _keys(name: str, config: DrafterConfig) -> str:
    """The config keys a shape follows from."""
    hidden, heads, kv = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
    part = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
    known = {
        "embed_tokens": f"vocab_size {config.vocab_size}, hidden_size {hidden}",
        "lm_head": f"draft_vocab_size {config.draft_vocab_size}, hidden_size {hidden}",
        "fc": f"hidden_size {hidden} and {config.num_aux_states} aux states",
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


@dataclass
class _Counts:
    """Sums over one tensor, taken piece by piece."""

    low: float = float("inf")
    high: float = float("-inf")
    nan: int = 0
    inf: int = 0
    first_bad: int | None = None
    zero_rows: int = 0


def check_values(report: Report, weights: DrafterWeights) -> None:
    """Every value finite; no zeros or constants where weights should be."""
    for name, entry in sorted(weights.entries.items()):
        if entry.dtype not in _FLOATS or 0 in entry.shape:
            continue
        try:
            counts = _scan(entry)
        except UnreadableFile as error:
            add_unreadable(report, error)
            continue
        _judge_values(report, name, entry, counts)


def _scan(entry: Entry) -> _Counts:
    counts, seen = _Counts(), 0
    columns = entry.shape[-1] if len(entry.shape) > 1 else 0
    for piece in entry.chunks():
        low, high = (float(value) for value in torch.aminmax(piece))
        # aminmax passes NaN on, so two numbers tell whether the slow count is needed.
        if not (abs(low) < float("inf") and abs(high) < float("inf")):
            _count_bad(counts, piece, seen)
        else:
            counts.low, counts.high = min(counts.low, low), max(counts.high, high)
        if columns and piece.numel() % columns == 0:
            counts.zero_rows += _zero_rows(piece.view(-1, columns))
        seen += piece.numel()
    return counts


def _count_bad(counts: _Counts, piece: Tensor, seen: int) -> None:
    nan, inf = torch.isnan(piece), torch.isinf(piece)
    if counts.first_bad is None:
        counts.first_bad = seen + int((nan | inf).nonzero()[0])
    counts.nan += int(nan.sum())
    counts.inf += int(inf.sum())
    good = piece[~(nan | inf)]
    if good.numel():
        counts.low, counts.high = min(counts.low, float(good.min())), max(counts.high, float(good.max()))


def _zero_rows(rows: Tensor) -> int:
    """Rows of zeros; only those that begin with a zero are looked at in full."""
    candidates = (rows[:, 0] == 0).nonzero().flatten()
    return int((rows[candidates] == 0).all(dim=1).sum()) if candidates.numel() else 0


def _judge_values(report: Report, name: str, entry: Entry, counts: _Counts) -> None:
    def add(code: str, message: str) -> None:
        report.add(code, f"{name} {message}", file=entry.file, tensor=name)

    if counts.nan or counts.inf:
        place = counts.first_bad or 0
        at = [place] if len(entry.shape) < 2 else [place // entry.shape[-1], place % entry.shape[-1]]
        add("not_finite", f"holds {counts.nan} NaN and {counts.inf} Inf, the first at {at}")
    elif counts.low == counts.high == 0:
        if not name.endswith(".bias"):
            add("all_zero", f"{list(entry.shape)} is all zero")
    elif counts.low == counts.high and len(entry.shape) > 1:
        add("constant", f"{list(entry.shape)} is {counts.low:g} everywhere")
    elif counts.zero_rows:
        code = "zero_embedding_rows" if name == "embed_tokens.weight" else "zero_rows"
        add(code, f"has {counts.zero_rows} rows of zeros out of {entry.shape[0]}")
    if max(abs(counts.low), abs(counts.high)) > EXTREME and counts.low <= counts.high:
        add("extreme_values", f"ranges from {counts.low:g} to {counts.high:g}")
