"""Writing one checkpoint: everything into a temp directory, then one rename.

    <parent>/.checkpoint-<name>-<pid>.tmp/      while it is written or removed; nobody takes it for one
    <parent>/<name>/                             complete
        config.json                  speculators 0.9 format; with latent attention, which that cannot say, as vLLM and
                                     SGLang read it for Eagle3DeepseekV2ForCausalLM
        generation_config.json
        model.safetensors            floats as bf16, d2t int64, t2d bool
        optimizer_state_dict.pt
        scheduler_state_dict.pt
        manifest.json                written last: size and digest of every file, digest of every tensor

Source of the layout: speculators 0.9.0 `train/checkpointer.py` and the files it wrote.
"""

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from eagle3_core.checkpoint.digest import ALGORITHM, file_digest, hasher
from eagle3_core.checkpoint.manifest import MANIFEST_NAME, MANIFEST_VERSION
from eagle3_core.checkpoint.stream import Stream
from eagle3_core.contract.drafter_config import MLA, DrafterConfig, expected_tensors
from eagle3_core.contract.headers import TensorFile, read_header
from eagle3_core.contract.jobdir import fsync_directory
from eagle3_core.contract.jsonfiles import read_json_object
from eagle3_core.errors import CheckpointError

SPECULATORS_VERSION = "0.9.0"
TRANSFORMERS_VERSION = "5.19.0"

_TEMP_GLOB = ".checkpoint-*.tmp"
_NO_ROOM_BYTES = 1 << 22


def write_checkpoint(
    parent: Path,
    name: str,
    *,
    epoch: int,
    config: DrafterConfig,
    tensors: dict[str, Tensor],
    optimizer_state: dict[str, Any],
    scheduler_state: dict[str, Any],
    verifier_name: str,
    verifier_architectures: list[str] | tuple[str, ...],
    speculative_tokens: int,
    step: int,
    extra: dict[str, Any],
) -> Path:
    """The directory `parent/name`, which is complete once it exists.

    Args:
        parent: the job's output directory; must exist. Only one writer at a time.
        name: of the directory: the epoch's number at its end, `step_<n>` within an epoch.
        epoch: counts from 0.
        config: what the drafter computes.
        tensors: canonical name -> tensor; those of `expected_tensors(config)`, any float dtype; a map over the full
            vocabulary is left out.
        optimizer_state: `state_dict()` of the optimizer, kept in its own precision.
        scheduler_state: `state_dict()` of the learning-rate schedule.
        verifier_name: path or hub id of the verifier, for servers.
        verifier_architectures: class names from the verifier's config.
        speculative_tokens: draft tokens a round, for servers.
        step: optimizer steps done so far.
        extra: kept in the manifest, for example what `finetune_from` was overridden with.

    Raises:
        CheckpointError: the tensors are not what the config says, or the directory exists already.
        OSError: the disk is full or the like; nothing is left behind.
    """
    if config.draft_vocab_size == config.vocab_size:
        # A map over the full vocabulary says nothing, and vLLM refuses a checkpoint that brings one.
        tensors = {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
    _check(config, tensors)
    final = parent / name
    if final.exists():
        raise CheckpointError(f"{final}: exists already; a checkpoint is never overwritten")
    clear_leftovers(parent)
    temp = _aside(final)
    temp.mkdir()
    try:
        if config.mla is None:
            said = speculators_config(config, verifier_name, verifier_architectures, speculative_tokens)
        else:
            said = deepseek_config(config, config.mla)
        _write_json(temp / "config.json", said)
        _write_json(temp / "generation_config.json", _generation_config(config))
        _save_tensors(temp / "model.safetensors", tensors)
        _save_state(temp / "optimizer_state_dict.pt", optimizer_state)
        _save_state(temp / "scheduler_state_dict.pt", scheduler_state)
        write_manifest(temp, epoch=epoch, step=step, extra=extra)
        fsync_directory(temp)
        temp.rename(final)
    except BaseException:
        shutil.rmtree(temp, ignore_errors=True)
        raise
    fsync_directory(parent)
    return final


def set_aside(path: Path) -> Path:
    """Take a checkpoint's name away from it in one step; returns where it lies until its files are removed."""
    aside = _aside(path)
    path.rename(aside)
    fsync_directory(path.parent)
    return aside


def clear_leftovers(parent: Path) -> list[Path]:
    """Remove what a killed writer or remover left in an output directory. Only while nobody else writes there.

    Returns:
        The former paths of those that were whole: set aside, with nobody told yet.
    """
    whole = []
    for stale in sorted(parent.glob(_TEMP_GLOB)):
        if (stale / MANIFEST_NAME).exists():
            whole.append(parent / stale.name.removeprefix(".checkpoint-").rpartition("-")[0])
        shutil.rmtree(stale)
    return whole


def _aside(path: Path) -> Path:
    return path.with_name(f".checkpoint-{path.name}-{os.getpid()}.tmp")


def speculators_config(
    config: DrafterConfig,
    verifier_name: str,
    verifier_architectures: list[str] | tuple[str, ...],
    speculative_tokens: int,
) -> dict[str, Any]:
    """config.json as speculators 0.9.0 writes it; every flag explicit, no custom code."""
    layer = _layer_config(config) | {
        "attention_bias": config.attention_bias,
        "head_dim": config.head_dim,
        "mlp_bias": False,
        "model_type": "qwen3" if config.qk_norm else "llama",
        "pad_token_id": None,
        "pretraining_tp": 1,
    }
    if config.sliding_window is not None:
        layer |= {
            "layer_types": ["sliding_attention"] * config.num_hidden_layers,
            "sliding_window": config.sliding_window,
            "use_sliding_window": True,
        }
    ids = config.aux_layer_ids
    return {
        "architectures": ["Eagle3DraftModel"],
        "draft_vocab_size": config.draft_vocab_size,
        "dtype": "bfloat16",
        "eagle_aux_hidden_state_layer_ids": None if ids is None else list(ids),
        "embed_requires_grad": config.own_embedding,
        "fc_norm": config.fc_norm,
        "norm_before_fc": config.norm_before_fc,
        "norm_before_residual": config.norm_before_residual,
        "norm_output": config.norm_output,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "accept_tolerance": 0.0,
                    "proposal_type": "greedy",
                    "speculative_tokens": speculative_tokens,
                    "verifier_accept_k": 1,
                }
            ],
            "verifier": {"architectures": list(verifier_architectures), "name_or_path": verifier_name},
        },
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS_VERSION,
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": layer,
        "transformers_version": TRANSFORMERS_VERSION,
    }


def deepseek_config(config: DrafterConfig, mla: MLA) -> dict[str, Any]:
    """config.json of a drafter with latent attention, for vLLM 0.33 and SGLang 0.5.23; the layer ids for both.

    model_type deepseek_v2 is the one that vLLM neither rewrites nor fails to take for latent attention. vLLM takes the
    ids at the top, SGLang those in eagle_config: outputs of layers if they begin with 1, else states as at the top. So
    states that begin with 1 cannot be said to SGLang.
    """
    ids = config.aux_layer_ids
    nested: dict[str, Any] = {"use_aux_hidden_state": True}
    if ids is not None and ids[0] != 1:
        nested["eagle_aux_hidden_state_layer_ids"] = [layer - (ids[0] == 2) for layer in ids]
    return {
        "architectures": ["Eagle3DeepseekV2ForCausalLM"],
        "attention_bias": False,
        "draft_vocab_size": config.draft_vocab_size,
        "dtype": "bfloat16",
        "eagle_aux_hidden_state_layer_ids": None if ids is None else list(ids),
        "eagle_config": nested,
        "embed_requires_grad": config.own_embedding,
        "fc_norm": config.fc_norm,
        "model_type": "deepseek_v2",
        "norm_before_residual": config.norm_before_residual,
        "norm_output": config.norm_output,
        "num_aux_hidden_states": config.num_aux_states,
        "transformers_version": TRANSFORMERS_VERSION,
        **mla.model_dump(),
        **_layer_config(config),
    }


def _layer_config(config: DrafterConfig) -> dict[str, Any]:
    """Sizes and rope, as every kind of decoder names them."""
    rope = config.rope
    layer: dict[str, Any] = {
        "attention_dropout": 0.0,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "hidden_act": config.hidden_act,
        "hidden_size": config.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_position_embeddings,
        "num_attention_heads": config.num_attention_heads,
        "num_hidden_layers": config.num_hidden_layers,
        "num_key_value_heads": config.num_key_value_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": rope,
        # Readers of the transformers 4 layout would fall back to 10000 in silence.
        "rope_theta": rope["rope_theta"],
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": config.vocab_size,
    }
    if rope["rope_type"] != "default":
        layer["rope_scaling"] = dict(rope)
    return layer


def _generation_config(config: DrafterConfig) -> dict[str, Any]:
    tokens = {"bos_token_id": config.bos_token_id, "eos_token_id": config.eos_token_id}
    known = {key: value for key, value in tokens.items() if value is not None}
    return {"_from_model_config": True, **known, "transformers_version": TRANSFORMERS_VERSION}


def _check(config: DrafterConfig, tensors: dict[str, Tensor]) -> None:
    expected = expected_tensors(config)
    if missing := sorted(expected.keys() - tensors.keys()):
        raise CheckpointError(f"cannot write a checkpoint without {', '.join(missing)}")
    if extra := sorted(tensors.keys() - expected.keys()):
        raise CheckpointError(f"cannot write a checkpoint with {', '.join(extra)}, which its config does not know")
    for name, (shape, _) in expected.items():
        if tuple(tensors[name].shape) != shape:
            raise CheckpointError(f"{name} has shape {list(tensors[name].shape)}, the config says {list(shape)}")


def _save_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    saved = {}
    for name, tensor in sorted(tensors.items()):
        kind = torch.int64 if name == "d2t" else torch.bool if name == "t2d" else torch.bfloat16
        # Tied or sliced tensors share storage, which the format refuses; a copy does not.
        saved[name] = tensor.detach().to(device="cpu", dtype=kind, copy=True).contiguous()
    with _whole(path):
        save_file(saved, path, metadata={"format": "pt"})
        # Its writer lets nobody but the owner read; whoever serves the drafter may be another user.
        path.chmod((path.parent / "config.json").stat().st_mode)


def _save_state(path: Path, state: dict[str, Any]) -> None:
    with _whole(path), path.open("wb") as file:
        torch.save(state, file)


def _write_json(path: Path, data: dict[str, Any]) -> None:
    text = json.dumps(data, indent=2, sort_keys=True, allow_nan=False) + "\n"
    with _whole(path):
        path.write_text(text, encoding="utf-8")


@contextmanager
def _whole(path: Path) -> Iterator[None]:
    """What the body writes is on disk afterwards, or an OSError names the file."""
    try:
        yield
        with path.open("rb") as file:
            os.fsync(file.fileno())
    except (OSError, RuntimeError, SafetensorError) as error:
        raise _as_os_error(error, path) from error


def _as_os_error(error: Exception, path: Path) -> OSError:
    """torch and safetensors wrap the system's error into one of their own, from which only the text can be had."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError):
            return OSError(cause.errno, os.strerror(cause.errno or 0), str(path))
        cause = cause.__cause__ or cause.__context__
    number = next((n for n in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) if f"os error {n})" in str(error)), None)
    if number is None and shutil.disk_usage(path.parent).free < _NO_ROOM_BYTES:
        number = errno.ENOSPC
    return OSError(number or errno.EIO, f"{error}", str(path))


def write_manifest(directory: Path, *, epoch: int, step: int, extra: dict[str, Any]) -> None:
    """Write manifest.json over every file of a directory, each read once.

    Raises:
        OSError: the disk is full or the like.
        UnreadableFile: a weight file is damaged.
    """
    files, headers, tensors, stream = {}, {}, {}, Stream()
    for file in sorted(directory.iterdir()):
        if file.suffix != ".safetensors":
            digest = file_digest(file, stream)
        else:
            header = read_header(file)
            digests = _digests(header, stream)
            digest, headers[file.name] = digests.pop(_WHOLE), digests.pop(_HEADER)
            tensors[file.name] = {
                name: {"dtype": info.dtype, "shape": list(info.shape), "digest": digests[name]}
                for name, info in header.tensors.items()
            }
        files[file.name] = {"bytes": file.stat().st_size, "digest": digest}
    data = {
        "schema_version": MANIFEST_VERSION,
        "kind": "eagle3-checkpoint",
        "epoch": epoch,
        "step": step,
        "files": files,
        "headers": headers,
        "tensors": tensors,
        "config": read_json_object(directory / "config.json"),
        "extra": extra,
    }
    _write_json(directory / MANIFEST_NAME, data)


_WHOLE, _HEADER = "/whole", "/header"


def _digests(header: TensorFile, stream: Stream) -> dict[str, str]:
    """Digests of a weight file, of its header and of each tensor, from one reading."""
    parts = [(name, info.start, info.end) for name, info in header.tensors.items()]
    parts = [(_HEADER, 0, header.data_start), *sorted(parts, key=lambda part: part[1:])]
    whole, found = hasher(ALGORITHM), {}
    with stream.opened(header.path) as file:
        for name, start, end in parts:
            digest = hasher(ALGORITHM)
            for piece in file.pieces(start, end):
                whole.update(piece)
                digest.update(piece)
            found[name] = f"{ALGORITHM}:{digest.hexdigest()}"
    return found | {_WHOLE: f"{ALGORITHM}:{whole.hexdigest()}"}
