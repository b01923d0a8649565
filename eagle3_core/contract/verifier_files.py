"""What a drafter needs of its verifier: sizes, rope, and where embedding, head and final norm lie.

Standard library only. Only config, index and headers are read, so that a request can be refused before anything starts.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from eagle3_core.contract import tensor_names
from eagle3_core.contract.drafter_config import MLA
from eagle3_core.contract.jsonfiles import read_json_object
from eagle3_core.contract.other_models import ADAPTER_CONFIG
from eagle3_core.contract.tensor_names import EMBEDDING, FINAL_NORM, HEAD, Role
from eagle3_core.contract.verifier_config import VerifierConfig, read_verifier_config
from eagle3_core.contract.weight_files import TensorLocation, WeightFiles, read_weight_files
from eagle3_core.errors import BadInput

FLOAT_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tiktoken.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
)
_NOT_IN_FINGERPRINT = frozenset({"transformers_version", "_name_or_path", "torch_dtype", "dtype", "use_cache"})
_COMPARE_BYTES = 1 << 24


@dataclass(frozen=True)
class VerifierFiles:
    """A verifier directory, read and checked; no tensor is loaded."""

    path: Path
    architectures: tuple[str, ...]
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    mla: MLA | None
    rms_norm_eps: float
    rope: dict[str, Any]
    max_position_embeddings: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    tied: bool
    norm_gain_offset: float
    logit_scale: float
    final_logit_softcapping: float | None
    embedding: TensorLocation
    head: TensorLocation
    final_norm: TensorLocation
    warnings: list[tuple[str, str]]


def read_verifier_files(path: Path) -> VerifierFiles:
    """Everything known of a verifier without loading a tensor.

    Raises:
        BadInput: a directory, config, index or tensor that is missing, damaged, contradictory or quantised; the
            message names file, key and tensor.
        UnreadableFile: a weight file that is not what its header says.
    """
    config = read_verifier_config(path)
    weights = read_weight_files(path)
    warnings = config.warnings
    warnings.extend(weights.warnings)
    embedding = find_tensor(EMBEDDING, weights)
    vocab_size = config.vocab_size
    if vocab_size is None:
        vocab_size = embedding.info.shape[0]
        warnings.append(
            ("vocab_size_absent", f"{config.file}: no vocab_size; the {vocab_size} rows of {embedding.name} are used")
        )
    prefix = embedding.name.removesuffix(".weight").rpartition(".")[0]
    final_norm = find_tensor(FINAL_NORM, weights, f"{prefix}." if prefix else None)
    _check_matrix(config, EMBEDDING, embedding, vocab_size)
    _check_norm(config, weights, final_norm)
    head, tied = _head(config, weights, embedding)
    if not tied:
        _check_matrix(config, HEAD, head, vocab_size)
    _check_layers(config, weights, f"{prefix}." if prefix else "")
    _warn_of_adapters(config, weights)
    heads, kv_heads, head_dim = _attention_sizes(config, weights, f"{prefix}." if prefix else "")
    bos, eos = _special_tokens(config, path, vocab_size)
    return VerifierFiles(
        path=path,
        architectures=config.architectures,
        model_type=config.model_type,
        vocab_size=vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=_intermediate_size(config),
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        mla=_mla(config),
        rms_norm_eps=_eps(config),
        rope=config.rope(),
        max_position_embeddings=int(
            _or_default(config, config.number("max_position_embeddings"), 2048, "max_position_embeddings")
        ),
        bos_token_id=bos,
        eos_token_ids=eos,
        tied=tied,
        norm_gain_offset=config.family.gain_offset,
        logit_scale=config.logit_scale(),
        final_logit_softcapping=config.softcap(),
        embedding=embedding,
        head=head,
        final_norm=final_norm,
        warnings=warnings,
    )


def find_tensor(role: Role, weights: WeightFiles, sibling_prefix: str | None = None) -> TensorLocation:
    """The tensor that plays a role, unquantised.

    Raises:
        BadInput: none fits (the near names are listed), two fit, or it is quantised.
    """
    found = _find(role, weights, sibling_prefix)
    if found is None:
        near = tensor_names.near_names(role, weights.tensors)
        raise BadInput(
            f"{weights.path}: no {role.title} found: {role.plain} is not there under any known prefix; "
            + (f"near names: {', '.join(near)}" if near else "and no name comes near it")
        )
    return found


def _find(role: Role, weights: WeightFiles, sibling_prefix: str | None = None) -> TensorLocation | None:
    try:
        base = tensor_names.find_base(role, weights.tensors.keys(), sibling_prefix)
    except BadInput as error:
        raise BadInput(f"{weights.path}: {error}") from error
    if base is None:
        return None
    for suffix, scheme in tensor_names.QUANTISED_SUFFIXES:
        if base + suffix in weights.tensors:
            main = weights.tensors.get(f"{base}.weight", weights.tensors[base + suffix])
            raise BadInput(
                f"{main.file}: quantised {role.title} not supported: {main.name} is {main.info.dtype} "
                f"{list(main.info.shape)} with {base}{suffix} beside it ({scheme}); "
                f"give a verifier whose {role.title} is kept in bf16"
            )
    location = weights.tensors[f"{base}.weight"]
    if location.info.dtype not in FLOAT_DTYPES:
        raise BadInput(
            f"{location.file}: quantised {role.title} not supported: {location.name} is {location.info.dtype} "
            f"{list(location.info.shape)} (no scale beside it); give a verifier whose {role.title} is kept in bf16"
        )
    return location


def _head(config: VerifierConfig, weights: WeightFiles, embedding: TensorLocation) -> tuple[TensorLocation, bool]:
    """The head and whether it is the embedding."""
    stored = _find(HEAD, weights)
    bias = "lm_head.bias" if stored is None else stored.name.removesuffix("weight") + "bias"
    if bias in weights.tensors:
        raise BadInput(f"{weights.path}: {bias}: a head with a bias is not supported; targets would be without it")
    if stored is None:
        if config.tied:
            return embedding, True
        stated = config.text.get("tie_word_embeddings") is False
        said = "says tie_word_embeddings: false" if stated else "does not say tie_word_embeddings: true"
        where = weights.files[0] if len(weights.files) == 1 else f"{weights.path} ({len(weights.files)} files)"
        near = tensor_names.near_names(HEAD, weights.tensors)
        raise BadInput(
            f"lm_head.weight is not in {where}, and {config.file} {said}"
            + (f"; near names: {', '.join(near)}" if near else "")
        )
    if not config.tied:
        return stored, False
    if _same_bytes(stored, embedding):
        return embedding, True
    # vLLM and SGLang, which will serve the drafter, obey the flag and skip the stored head; transformers 4 ties over
    # it as well. transformers 5 keeps two tensors that differ apart, hence the loud warning.
    config.warnings.append(
        (
            "tied_head_differs",
            f"{config.file} says tie_word_embeddings: true, yet {stored.name} is stored and differs from "
            f"{embedding.name}; {embedding.name} is used as the head, as vLLM and SGLang do "
            "(transformers 5 would use the stored head: set the flag to false if that is what you mean)",
        )
    )
    return embedding, True


def _same_bytes(one: TensorLocation, other: TensorLocation) -> bool:
    if (one.info.dtype, one.info.shape) != (other.info.dtype, other.info.shape):
        return False
    with one.file.open("rb") as first, other.file.open("rb") as second:
        first.seek(one.info.start)
        second.seek(other.info.start)
        left = one.info.end - one.info.start
        while left > 0:
            size = min(left, _COMPARE_BYTES)
            chunk = first.read(size)
            if not chunk or chunk != second.read(size):
                return False
            left -= len(chunk)
    return True


def _check_norm(config: VerifierConfig, weights: WeightFiles, norm: TensorLocation) -> None:
    """An RMSNorm over hidden_size."""
    if norm.name.removesuffix(".weight") + ".bias" in weights.tensors:
        raise BadInput(f"{weights.path}: {norm.name} has a bias: a LayerNorm, and only RMSNorm verifiers are supported")
    if config.family.layer_norm:
        raise BadInput(
            f"{config.file}: model_type {config.model_type!r} has a LayerNorm before its head, and only RMSNorm "
            "verifiers are supported"
        )
    if norm.info.shape != (config.hidden_size,):
        raise BadInput(
            f"{norm.file}: {norm.name} has shape {list(norm.info.shape)}, hidden_size is {config.hidden_size}"
        )


def _check_layers(config: VerifierConfig, weights: WeightFiles, prefix: str) -> None:
    """Warn where the weights hold layers behind the last one that the config states, which transformers leaves out."""
    parts = (name.removeprefix(f"{prefix}layers.").split(".", 1)[0] for name in weights.tensors if ".layers." in name)
    numbers = [int(part) for part in parts if part.isascii() and part.isdigit() and len(part) < 6]
    further = config.text.get("num_nextn_predict_layers")  # which predict tokens (DeepSeek, GLM)
    stated = config.num_hidden_layers + (further if type(further) is int else 0)
    if (stored := max(numbers, default=-1) + 1) > stated:
        config.warnings.append(
            (
                "layers_left_out",
                f"{config.file} says num_hidden_layers {config.num_hidden_layers}, yet {prefix}layers.{stored - 1} is "
                "stored: what stands behind the last layer is left out",
            )
        )


def _warn_of_adapters(config: VerifierConfig, weights: WeightFiles) -> None:
    """Low-rank adapters beside the weights are no part of what a server without them serves."""
    lora = next((name for name in weights.tensors if ".lora_A." in name), None)
    beside = weights.path / ADAPTER_CONFIG
    if lora is not None or beside.exists():
        what = f"{weights.path} holds {lora if lora is not None else beside.name}: a LoRA adapter that was not merged"
        config.warnings.append(
            ("adapter_not_merged", f"{what}; merge it, or take it out, so that states are of one model")
        )


def _check_matrix(config: VerifierConfig, role: Role, location: TensorLocation, vocab_size: int) -> None:
    """[rows, hidden_size] with at least vocab_size rows; more is padding and worth a word."""
    shape = location.info.shape
    if len(shape) != 2 or shape[1] != config.hidden_size:
        raise BadInput(
            f"{location.file}: {location.name} has shape {list(shape)}, expected [{vocab_size}, {config.hidden_size}] "
            f"from vocab_size and hidden_size of {config.file.name}"
        )
    if shape[0] < vocab_size:
        raise BadInput(
            f"{location.file}: {location.name} has {shape[0]} rows, fewer than vocab_size {vocab_size} "
            f"of {config.file.name}"
        )
    if shape[0] > vocab_size:
        config.warnings.append(
            (
                "padded_vocabulary",
                f"{location.file}: {location.name} has {shape[0]} rows, vocab_size is {vocab_size}; "
                f"the last {shape[0] - vocab_size} rows of the {role.title} are taken for padding",
            )
        )


def _attention_sizes(config: VerifierConfig, weights: WeightFiles, prefix: str) -> tuple[int, int, int]:
    """(attention heads, key-value heads, head_dim), checked against the plain q_proj of layer 0 if there is one."""
    heads = config.need("num_attention_heads")
    kv_heads = config.number("num_key_value_heads") or heads
    if heads % kv_heads:
        raise BadInput(f"{config.file}: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
    if config.is_mla:
        return heads, kv_heads, _mla_head_dim(config, heads)
    stated = config.number("head_dim")
    head_dim = stated if stated is not None else config.hidden_size // heads
    rows = _query_rows(config, weights, prefix)
    if rows is None:
        if stated is None and config.hidden_size % heads:
            raise BadInput(
                f"{config.file}: head_dim is not stated and hidden_size {config.hidden_size} is no multiple of "
                f"num_attention_heads {heads}"
            )
        return heads, kv_heads, head_dim
    location, count = rows
    if count != heads * head_dim:
        how = f"head_dim {head_dim}" if stated is not None else f"head_dim {head_dim} (hidden_size / heads)"
        raise BadInput(
            f"{location.file}: {location.name} has {location.info.shape[0]} rows, but {config.file.name} says "
            f"num_attention_heads {heads} x {how} = {heads * head_dim}"
        )
    return heads, kv_heads, head_dim


def _query_rows(config: VerifierConfig, weights: WeightFiles, prefix: str) -> tuple[TensorLocation, int] | None:
    """The plain q_proj of layer 0 and its query rows; None where it is absent, fused or packed."""
    location = weights.tensors.get(f"{prefix}layers.0.self_attn.q_proj.weight")
    if location is None or location.info.dtype not in FLOAT_DTYPES or len(location.info.shape) != 2:
        return None
    rows = location.info.shape[0]
    # Qwen3-Next and its successors put an output gate of the same width into q_proj.
    gated = config.text.get("attn_output_gate", config.model_type.startswith(("qwen3_next", "qwen3_5")))
    return location, rows // 2 if gated else rows


def _mla_head_dim(config: VerifierConfig, heads: int) -> int:
    """v_head_dim: the width attention returns per head, which is what published llama-style drafters of
    DeepSeek and Kimi models use (64 heads of 128 for Kimi K2)."""
    chosen = config.number("v_head_dim") or config.number("qk_nope_head_dim") or config.hidden_size // heads
    config.warnings.append(
        (
            "mla_head_dim",
            f"{config.file}: the verifier has latent attention; a llama-style drafter takes head_dim {chosen} "
            "(v_head_dim) by default",
        )
    )
    return chosen


def _mla(config: VerifierConfig) -> MLA | None:
    """The sizes of the verifier's latent attention; None where it has none, or none a drafter could take over."""
    try:
        return MLA.model_validate({name: config.text.get(name) for name in MLA.model_fields})
    except ValidationError:
        return None


def _intermediate_size(config: VerifierConfig) -> int:
    """Of the dense MLP; experts-only verifiers get the width one token passes through."""
    stated = config.number("intermediate_size") or config.number("ffn_hidden_size")
    if stated is not None:
        return stated
    expert = config.number("moe_intermediate_size")
    if expert is None:
        chosen, why = 4 * config.hidden_size, "4 x hidden_size"
    else:
        active = config.number("num_experts_per_tok") or 1
        shared = config.text.get("n_shared_experts")
        active += shared if type(shared) is int and shared > 0 else 0
        chosen, why = expert * active, f"moe_intermediate_size {expert} x {active} active experts"
    config.warnings.append(
        ("intermediate_size_absent", f"{config.file}: no intermediate_size; the drafter's default is {chosen} ({why})")
    )
    return chosen


def _eps(config: VerifierConfig) -> float:
    eps = _or_default(config, config.real("rms_norm_eps"), config.family.eps, "rms_norm_eps")
    if eps < 0:
        raise BadInput(f"{config.file}: rms_norm_eps is {eps:g}, not 0 or more")
    return eps


def _or_default(config: VerifierConfig, value: float | None, default: float, key: str) -> float:
    if value is not None:
        return value
    config.warnings.append((f"{key}_absent", f"{config.file}: no {key}; {default:g} is used"))
    return default


def _special_tokens(config: VerifierConfig, path: Path, vocab_size: int) -> tuple[int | None, tuple[int, ...]]:
    """bos, and every eos id of config.json and generation_config.json: all of them end a text."""
    found: list[int] = []
    sources: list[tuple[Path, Any]] = [(config.file, config.text.get("eos_token_id"))]
    generation = path / "generation_config.json"
    if generation.is_file():
        sources.append((generation, read_json_object(generation).get("eos_token_id")))
    for file, value in sources:
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(item) is int and item >= 0 for item in ids):
            raise BadInput(f"{file}: eos_token_id is {value!r}, neither a token id nor a list of them")
        found.extend(item for item in ids if item not in found)
        if outside := [item for item in ids if item >= vocab_size]:
            what = f"{file}: eos_token_id {outside} lies outside the vocabulary of {vocab_size}; no text ends with it"
            config.warnings.append(("eos_outside_vocabulary", what))
    bos = config.text.get("bos_token_id")
    if isinstance(bos, list):
        bos = bos[0] if bos else None
    if bos is not None and type(bos) is not int:
        raise BadInput(f"{config.file}: bos_token_id is {bos!r}, not a token id")
    return bos, tuple(found)


def config_fingerprint(path: Path) -> str:
    """sha256 of config.json without the keys that change nothing a verifier computes.

    Raises:
        BadInput: config.json is missing or broken.
    """
    config = {k: v for k, v in read_json_object(path / "config.json").items() if k not in _NOT_IN_FINGERPRINT}
    return hashlib.sha256(json.dumps(config, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def tokenizer_fingerprint(path: Path) -> str:
    """sha256 over names and bytes of the tokenizer's files.

    Raises:
        BadInput: none of them is there.
    """
    digest = hashlib.sha256()
    found = [path / name for name in _TOKENIZER_FILES if (path / name).is_file()]
    if not found:
        raise BadInput(f"{path}: no tokenizer: none of {', '.join(_TOKENIZER_FILES[:4])} is there")
    for file in found:
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()
