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

from eagle3_core.checkpoint.config_styles import (
    flat_config,
    generation_config,
    speculators_config,
)
from eagle3_core.checkpoint.digest import ALGORITHM, file_digest, hasher
from eagle3_core.checkpoint.layer_ids import sglang_ids
from eagle3_core.checkpoint.manifest import MANIFEST_NAME, MANIFEST_VERSION
from eagle3_core.checkpoint.stream import Stream
from eagle3_core.contract.drafter_config import DrafterConfig, expected_tensors
from eagle3_core.contract.headers import TensorFile, read_header
from eagle3_core.contract.jobdir import fsync_directory
from eagle3_core.contract.jsonfiles import read_json_object
from eagle3_core.errors import CheckpointError

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
            said = flat_config(config, nested_ids=sglang_ids(config.aux_layer_ids, "deepseek", None))
        write_config(temp / "config.json", said)
        write_config(temp / "generation_config.json", generation_config(config))
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
    with whole(path):
        save_file(saved, path, metadata={"format": "pt"})
        # Its writer lets nobody but the owner read; whoever serves the drafter may be another user.
        path.chmod((path.parent / "config.json").stat().st_mode)


def _save_state(path: Path, state: dict[str, Any]) -> None:
    with whole(path), path.open("wb") as file:
        torch.save(state, file)


def write_config(path: Path, data: dict[str, Any]) -> None:
    """A JSON file, on disk when this returns."""
    text = json.dumps(data, indent=2, sort_keys=True, allow_nan=False) + "\n"
    with whole(path):
        path.write_text(text, encoding="utf-8")


@contextmanager
def whole(path: Path) -> Iterator[None]:
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


def write_manifest(directory: Path, *, epoch: int | None, step: int | None, extra: dict[str, Any]) -> None:
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
    write_config(directory / MANIFEST_NAME, data)


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
