"""config.json of a drafter, in any of the formats drafters are published in, as one DrafterConfig.

    speculators   speculators_config, transformer_layer_config {sizes, rope}, flags and aux ids at the top
    others        an architecture with Eagle3 in its name, or LlamaForCausalLM + draft_vocab_size: sizes at the top,
                  also those of latent attention; flags and aux ids at the top or in eagle_config

Aux layer ids: at the top, id k is the state entering layer k (vLLM, speculators). Nested ids that begin with 1 are
outputs of layers (SpecForge, SGLang, Model-Optimizer) and are read as k + 1; others stay, as SGLang does for DeepSeek
and Kimi, and as the published AQ-MedAI drafters mean [2, 30, 58].
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from eagle3_core.contract.drafter_config import MLA, DrafterConfig
from eagle3_core.contract.drafter_keys import misspelt, null, peculiar
from eagle3_core.contract.jsonfiles import read_json_object
from eagle3_core.contract.other_models import kind_by_config, kind_by_names
from eagle3_core.contract.rope import normalise_rope
from eagle3_core.contract.weight_files import read_weight_files
from eagle3_core.errors import BadInput, CheckpointError, NotADrafter

FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_OLDER_FLAGS = {"fc_norm": ("use_aux_norm",)}
"""What SGLang takes for a flag as well, beside tensors called aux_norm_low, mid and high."""

_LLAMA_TYPES = ("llama", "qwen3")
_QWEN3_CLASS = "Eagle3Qwen3ForCausalLM"
"""What vLLM goes by, whatever model_type says."""

_MLA_TYPES = ("deepseek_v2", "deepseek_v3", "kimi_k2", "kimi_k25")
_MAX_LAYERS = 256
_NOT_ONE = "not an EAGLE-3 drafter:"
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt")
KEPT_KEY = "eyas_verifier"
"""Where our flat configs keep what the speculators format says of the verifier."""

_AUX_KEY = "eagle_aux_hidden_state_layer_ids"

_SCALING: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings"),
}
"""What each kind of rope cannot be computed without."""

_TWICE = frozenset({"rope_base_conflict", "rope_type_conflict", "rope_section_conflict"})


@dataclass(frozen=True)
class DrafterSource:
    """A drafter's config and how it was read.

    config: what it computes, as far as DrafterConfig can say.
    format: speculators, modelopt, specforge, official-eagle or hf-eagle3.
    verifier_name: what the config says about its verifier, if anything.
    notes: decisions made in reading, one sentence each.
    unsupported: what DrafterConfig cannot say; training refuses such a source.
    unjudged: those of `unsupported` that the judge does not know either.
    faults: what it says in two ways or misspells, one sentence each.
    extras: mlp_bias, fc_bias: parts with tensors of their own.
    target_hidden_size: width of the aux states where it is not hidden_size.
    captured_after: made by speculators 0.3, whose layer ids mean the state after the layer and are not written.
    tied: tie_word_embeddings is true.
    raw: config.json itself.
    """

    config: DrafterConfig
    format: str
    verifier_name: str | None
    notes: list[str] = field(default_factory=list)
    unsupported: list[str] = field(default_factory=list)
    unjudged: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    extras: frozenset[str] = frozenset()
    target_hidden_size: int | None = None
    captured_after: bool = False
    tied: bool = False
    raw: Mapping[str, Any] = field(default_factory=dict)


def read_drafter_config(path: Path) -> DrafterSource:
    """The config of a drafter that Eyas can train on or evaluate; of a directory or of a config file of any name.

    Raises:
        CheckpointError: no or a broken config, one that contradicts itself, not an EAGLE-3 drafter, or one with parts
            Eyas does not know.
    """
    source = describe_drafter(path)
    if source.faults:
        raise CheckpointError(f"{_config_file(path)}: {source.faults[0]}")
    if source.unsupported:
        raise CheckpointError(f"{_config_file(path)}: not supported: {'; '.join(source.unsupported)}")
    return source


def describe_drafter(path: Path) -> DrafterSource:
    """Like `read_drafter_config`, but what is not supported is listed instead of refused.

    Raises:
        CheckpointError: no or a broken config, or not an EAGLE-3 drafter at all.
    """
    file = _config_file(path)
    try:
        whole = read_json_object(file)
    except BadInput as error:
        raise CheckpointError(str(error)) from error
    speculators = "speculators_config" in whole or "speculators_model_type" in whole
    kind = whole.get("speculators_model_type")
    if kind not in (None, "eagle3"):
        raise NotADrafter(f"{file}: {_NOT_ONE} {kind_by_names([str(kind)]) or f'speculators_model_type is {kind!r}'}")
    sizes = whole.get("transformer_layer_config") if speculators else whole
    if not isinstance(sizes, dict):
        raise CheckpointError(f"{file}: transformer_layer_config is {sizes!r}, not an object")
    nested = {} if whole.get("eagle_config") is None else whole["eagle_config"]
    if not isinstance(nested, dict):
        raise CheckpointError(f"{file}: eagle_config is {nested!r}, not an object")
    architectures = [] if whole.get("architectures") is None else whole["architectures"]
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise CheckpointError(f"{file}: architectures is {architectures!r}, not a list of names")
    form = "speculators" if speculators else _hf_format(file, whole, nested, architectures)
    notes: list[str] = []
    faults: list[str] = []
    target = _number(file, whole, "target_hidden_size")
    config = _drafter_config(file, whole, sizes, nested, notes, faults)
    inner = (sizes.get(key) for key in ("rope_scaling", "rope_parameters"))
    places = [whole, *([sizes] if speculators else []), nested, *(place for place in inner if isinstance(place, dict))]
    faults.extend((*misspelt(places), *null(places)))
    unjudged = _unjudged(sizes, speculators) + peculiar(places)
    extras = _extras(file, whole, sizes)
    wide = [f"target_hidden_size {target} unlike hidden_size {config.hidden_size}"]
    return DrafterSource(
        config=config,
        format=form,
        verifier_name=_verifier_name(whole),
        notes=notes,
        unsupported=unjudged + sorted(extras) + (wide if target not in (None, config.hidden_size) else []),
        unjudged=unjudged,
        faults=faults,
        extras=extras,
        target_hidden_size=target,
        captured_after=_by_speculators_0_3(whole),
        tied=_truth(file, whole, "tie_word_embeddings") or _truth(file, sizes, "tie_word_embeddings"),
        raw=whole,
    )


def _config_file(path: Path) -> Path:
    """config.json of a directory, or the file itself.

    Raises:
        CheckpointError: a weight file, or a directory of checkpoints.
    """
    if path.is_file():
        if path.suffix in WEIGHT_SUFFIXES:
            raise CheckpointError(f"{path} is a file of weights; give the directory that holds it and config.json")
        return path
    file = path / "config.json"
    if not file.exists() and path.is_dir():
        epochs = sorted(int(inner.name) for inner in path.iterdir() if inner.name.isascii() and inner.name.isdigit())
        if epochs:
            raise CheckpointError(
                f"{path} is a directory of checkpoints; give one of them, such as {path / str(epochs[-1])}"
            )
    return file


def _by_speculators_0_3(whole: Mapping[str, Any]) -> bool:
    return str(whole.get("speculators_version", "")).startswith("0.3.")


def _hf_format(file: Path, whole: Mapping[str, Any], nested: Mapping[str, Any], names: list[str]) -> str:
    if "use_aux_hidden_state" in nested and "next_layer_regular" in nested:
        return "modelopt"
    if any("eagle3" in name.lower() for name in names):
        return "specforge" if names[0] == "LlamaForCausalLMEagle3" else "hf-eagle3"
    other = kind_by_names(names)
    if other is None and "draft_vocab_size" in whole:
        return "official-eagle"
    told = f"no speculators_config, no draft_vocab_size, and architectures is {names}"
    raise NotADrafter(f"{file}: {_NOT_ONE} {other or kind_by_config(whole) or told}")


def _drafter_config(
    file: Path,
    whole: Mapping[str, Any],
    sizes: dict[str, Any],
    nested: Mapping[str, Any],
    notes: list[str],
    faults: list[str],
) -> DrafterConfig:
    hidden, heads = _need(file, sizes, "hidden_size"), _need(file, sizes, "num_attention_heads")
    vocab = _need(file, sizes, "vocab_size")
    draft = _number(file, whole, "draft_vocab_size")
    if draft is None:
        notes.append("draft_vocab_size is not stated: the full vocabulary is assumed")
    if draft is not None and draft > vocab:
        raise CheckpointError(f"{file}: draft_vocab_size {draft} is larger than vocab_size {vocab}")
    kv_heads = _number(file, sizes, "num_key_value_heads") or heads
    if heads % kv_heads:
        raise CheckpointError(f"{file}: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
    ids = _aux_ids(file, whole, nested, notes, faults)
    head_dim = _number(file, sizes, "head_dim") or hidden // heads
    flags = {flag: _flag(file, flag, whole, nested, notes) for flag in FLAGS}
    if flags["norm_before_fc"] and flags["fc_norm"]:
        faults.append("norm_before_fc and fc_norm are both true: they exclude each other")
    try:
        mla = _mla(file, whole, sizes)
        if mla is None and head_dim % 2:
            raise CheckpointError(f"{file}: head_dim is {head_dim}, and channels are rotated in pairs")
        rope = _rope(file, sizes, notes, faults)
        return DrafterConfig(
            hidden_size=hidden,
            intermediate_size=_need(file, sizes, "intermediate_size"),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads if mla is None else heads,
            head_dim=head_dim if mla is None else mla.qk_head_dim,
            mla=mla,
            num_hidden_layers=_count(file, sizes, "num_hidden_layers") or 1,
            vocab_size=vocab,
            draft_vocab_size=draft or vocab,
            aux_layer_ids=ids,
            rms_norm_eps=_or_note(_fraction(file, sizes, "rms_norm_eps"), "rms_norm_eps", 1e-6, notes),
            max_position_embeddings=_or_note(
                _number(file, sizes, "max_position_embeddings"), "max_position_embeddings", 2048, notes
            ),
            rope=rope,
            hidden_act=sizes.get("hidden_act") or "silu",
            attention_bias=_truth(file, sizes, "attention_bias"),
            qk_norm=sizes.get("model_type") == "qwen3" or _QWEN3_CLASS in (whole.get("architectures") or []),
            sliding_window=_window(file, sizes),
            num_aux_states=_aux_count(file, whole, nested, ids, hidden),
            own_embedding=_truth(file, whole, "embed_requires_grad"),
            bos_token_id=sizes.get("bos_token_id"),
            eos_token_id=sizes.get("eos_token_id"),
            **flags,
        )
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise CheckpointError(f"{file}: {key} is {first['input']!r}: {first['msg']}") from error
    except BadInput as error:
        raise CheckpointError(str(error)) from error


def _rope(file: Path, sizes: Mapping[str, Any], notes: list[str], faults: list[str]) -> dict[str, Any]:
    """The rotation, with all that its kind needs."""
    rope, warnings = normalise_rope(sizes, str(file))
    for code, message in warnings:
        if code in _TWICE:
            faults.append(message.removeprefix(f"{file}: "))
        else:
            notes.append(message)
    kind = rope["rope_type"]
    if missing := [key for key in _SCALING.get(kind, ()) if key not in rope]:
        raise CheckpointError(f"{file}: {missing[0]} is missing, which rope_type {kind} needs")
    return rope


def _flag(file: Path, name: str, whole: Mapping[str, Any], nested: Mapping[str, Any], notes: list[str]) -> bool:
    """A norm flag, from eagle_config first as servers do, else from the top, else false."""
    for place, config in (("eagle_config.", nested), ("", whole)):
        for key in (name, *_OLDER_FLAGS.get(name, ())):
            value = config.get(key)
            if value is not None:
                if not isinstance(value, bool):
                    raise CheckpointError(f"{file}: {place}{key} is {value!r}, not true or false")
                return value
    if name == "norm_before_residual":
        notes.append(
            "norm_before_residual is not stated: read as false (vLLM reads true for speculators checkpoints without it)"
        )
    return False


def _aux_ids(
    file: Path, whole: Mapping[str, Any], nested: Mapping[str, Any], notes: list[str], faults: list[str]
) -> tuple[int, ...] | None:
    top = _id_list(file, whole, "")
    inner = _id_list(file, nested, "eagle_config.")
    read = inner
    if inner and inner[0] == 1:
        read = tuple(value + 1 for value in inner)
        if top is None:
            notes.append(f"eagle_config.{_AUX_KEY} {list(inner)} are outputs of layers: read as {list(read)}")
    if top is None and read is None:
        notes.append(f"{_AUX_KEY} is not stated: servers take [2, N//2, N-3]")
        if _by_speculators_0_3(whole):
            notes.append(
                "speculators 0.3 trained on states captured after layers 2, N//2, N-3, one later than servers take"
            )
    if top is not None and inner is not None and top != read:
        said = f"{_AUX_KEY} is {list(top)} at the top and {list(inner)} in eagle_config"
        if inner in (top, tuple(value - 1 for value in top)):
            notes.append(f"{said}: the top is used")
        else:  # SGLang takes them for states or for outputs of layers, and would be wrong with either
            faults.append(said)
    return top if top is not None else read


def _id_list(file: Path, config: Mapping[str, Any], place: str) -> tuple[int, ...] | None:
    value = config.get(_AUX_KEY)
    if value is None or value == []:
        return None
    if not isinstance(value, list) or not all(type(item) is int and item >= 0 for item in value):
        raise CheckpointError(f"{file}: {place}{_AUX_KEY} is {value!r}, not a list of layer ids (0, 1, 2 ...)")
    return tuple(value)


def _aux_count(
    file: Path,
    whole: Mapping[str, Any],
    nested: Mapping[str, Any],
    ids: tuple[int, ...] | None,
    hidden: int,
) -> int:
    """A: as stated, else as many as ids, else what the width of fc says, else three."""
    stated = _count(file, whole, "num_aux_hidden_states") or _count(file, nested, "num_aux_hidden_states")
    if stated is not None:
        return stated
    if ids is not None:
        return len(ids)
    columns, width = _fc_columns(file.parent), _number(file, whole, "target_hidden_size") or hidden
    return columns // width if columns and columns % width == 0 and columns // width <= _MAX_LAYERS else 3


def _fc_columns(path: Path) -> int | None:
    try:
        tensors = read_weight_files(path).tensors
    except BadInput:
        return None
    found = tensors.get("fc.weight") or tensors.get("model.fc.weight")
    return found.info.shape[1] if found is not None and len(found.info.shape) == 2 else None


def _window(file: Path, sizes: Mapping[str, Any]) -> int | None:
    """The sliding window of all layers; `layer_types` decides where it is given, else use_sliding_window."""
    kinds, slides = sizes.get("layer_types"), _truth(file, sizes, "use_sliding_window")
    if kinds is not None:
        if not isinstance(kinds, list) or not kinds or not all(isinstance(kind, str) for kind in kinds):
            raise CheckpointError(f"{file}: layer_types is {kinds!r:.80}, not a list of kinds of attention")
        slides = "sliding_attention" in kinds
    return _need(file, sizes, "sliding_window") if slides else None


def _mla(file: Path, whole: Mapping[str, Any], sizes: Mapping[str, Any]) -> MLA | None:
    """The sizes of latent attention, where a drafter has it."""
    if sizes.get("kv_lora_rank") is None:
        if "deepseek" in str(whole.get("architectures")).lower():
            raise CheckpointError(
                f"{file}: kv_lora_rank is missing, and {whole['architectures']} have latent attention"
            )
        return None
    if sizes.get("q_lora_rank") is None:
        raise CheckpointError(f"{file}: kv_lora_rank without q_lora_rank: servers need both for a drafter")
    return MLA(**{name: _need(file, sizes, name) for name in MLA.model_fields})


def _unjudged(sizes: Mapping[str, Any], speculators: bool) -> list[str]:
    kind, kinds = sizes.get("model_type"), sizes.get("layer_types")
    latent = sizes.get("kv_lora_rank") is not None
    known = _MLA_TYPES if latent else _LLAMA_TYPES
    found = [] if kind in (None, *known) else [f"model_type {kind!r} ({', '.join(known)} are known)"]
    if latent and speculators:
        found.append("latent attention in the speculators format, which servers refuse")
    if latent and sizes.get("attention_bias"):
        found.append("attention_bias beside latent attention")
    if isinstance(kinds, list) and len({str(each) for each in kinds}) > 1:
        found.append(f"layer_types {kinds} differ between layers")
    elif isinstance(kinds, list) and kinds[:1] not in (["full_attention"], ["sliding_attention"]):
        found.append(f"layer_types {kinds}, which is neither full_attention nor sliding_attention")
    return found


def _extras(file: Path, whole: Mapping[str, Any], sizes: Mapping[str, Any]) -> frozenset[str]:
    keys = {"mlp_bias": "mlp_bias", "fc_bias": "fc_bias", "bias": "fc_bias"}
    return frozenset(part for key, part in keys.items() if _truth(file, sizes, key) or _truth(file, whole, key))


def _verifier_name(whole: Mapping[str, Any]) -> str | None:
    section = whole.get("speculators_config")
    verifier = section.get("verifier") if isinstance(section, dict) else whole.get(KEPT_KEY)
    name = verifier.get("name_or_path") if isinstance(verifier, dict) else None
    return name if isinstance(name, str) else None


def _number(file: Path, config: Mapping[str, Any], key: str) -> int | None:
    value = config.get(key)
    if value is None:
        return None
    if type(value) is not int or not 0 < value < 2**31:
        raise CheckpointError(f"{file}: {key} is {value!r}, not a positive whole number")
    return value


def _truth(file: Path, config: Mapping[str, Any], key: str) -> bool:
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise CheckpointError(f"{file}: {key} is {value!r}, not true or false")
    return value is True


def _fraction(file: Path, config: Mapping[str, Any], key: str) -> float | None:
    value = config.get(key)
    if value is not None and not (type(value) in (int, float) and 0 < value < 1):
        raise CheckpointError(f"{file}: {key} is {value!r}, not a number between 0 and 1")
    return value


def _count(file: Path, config: Mapping[str, Any], key: str) -> int | None:
    """A number that tensors are listed by, so that nonsense must not make the list endless."""
    value = _number(file, config, key)
    if value is not None and value > _MAX_LAYERS:
        raise CheckpointError(f"{file}: {key} is {value}, more than {_MAX_LAYERS}")
    return value


def _need(file: Path, config: Mapping[str, Any], key: str) -> int:
    value = _number(file, config, key)
    if value is None:
        raise CheckpointError(f"{file}: {key} is missing")
    return value


def _or_note(value: Any, key: str, default: Any, notes: list[str]) -> Any:
    if value is None:
        notes.append(f"{key} is not stated: {default:g} is read, the default of its class")
        return default
    return value
