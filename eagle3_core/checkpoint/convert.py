"""Converting a checkpoint of any format into one that a server reads; what a format cannot express is refused.

    speculators   speculators 0.9, which vLLM reads as well
    vllm          vLLM's HF style
    sglang        SGLang's, with the names of SpecForge
    eagle         the official module of SafeAILab/EAGLE
    both          one directory for vLLM and SGLang

Weights are copied byte for byte, in the dtype they have. Draft ids are put into the order of verifier tokens, rows of
lm_head with them. Whether a server serves the result is decided by the judge's rules, before anything is copied and
again when all is written; the directory appears by one rename, or not at all.

    <parent>/.convert-<name>-<pid>.tmp/    while it is written
"""

import os
import shutil
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eagle3_core.checkpoint.config_styles import (
    Serving,
    flat_config,
    generation_config,
    official_config,
    speculators_config,
)
from eagle3_core.checkpoint.convert_source import DTYPES, Meaning, read_meaning
from eagle3_core.checkpoint.findings import Servability, Server, Verdict
from eagle3_core.checkpoint.judge import judge
from eagle3_core.checkpoint.layer_ids import default_states, sglang_ids
from eagle3_core.checkpoint.raw_tensors import RawTensor, copied, fill, lay_out, made, permuted
from eagle3_core.checkpoint.servability import judge_servers
from eagle3_core.checkpoint.stream import Stream
from eagle3_core.checkpoint.weights import Entry, open_drafter_weights
from eagle3_core.checkpoint.write import write_config, write_manifest
from eagle3_core.contract.drafter_config import DrafterConfig
from eagle3_core.contract.drafter_files import KEPT_KEY, describe_drafter
from eagle3_core.contract.jobdir import fsync_directory
from eagle3_core.contract.params import ServedFormat
from eagle3_core.contract.weight_files import TensorLocation
from eagle3_core.errors import BadInput, CheckpointError

SERVERS: dict[ServedFormat, tuple[Server, ...]] = {
    "speculators": ("speculators",),
    "vllm": ("vllm-v1", "vllm-v2"),
    "sglang": ("sglang",),
    "eagle": (),
    "both": ("vllm-v1", "vllm-v2", "sglang"),
}
"""Who must serve a format right, or it is not written."""

_WEIGHTS = "model.safetensors"
_MIDLAYER = ("sglang", "eagle")


@dataclass(frozen=True)
class Conversion:
    """What was written, how it was judged, and what had to be decided on the way."""

    path: Path
    target: ServedFormat
    source_format: str
    verdict: Verdict
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """`{"path", "to", "from", "notes", "verdict", "findings", "servers"}`."""
        told = self.verdict.to_dict()
        return {
            "path": str(self.path),
            "to": self.target,
            "from": self.source_format,
            "notes": list(self.notes),
            **told,
        }


def convert(
    source: Path,
    destination: Path,
    target: ServedFormat,
    *,
    verifier: Path | None = None,
    verifier_name: str | None = None,
    aux_layer_ids: Sequence[int] | None = None,
    max_mb_per_s: float | None = None,
    check_stop: Callable[[], None] = lambda: None,
) -> Conversion:
    """The drafter of one checkpoint as another format, judged.

    Args:
        source: checkpoint directory of any format, or an output directory, whose latest epoch is taken.
        destination: directory that is absent or empty.
        target: the format.
        verifier: its directory; gives embedding and head where the source has none and the format needs them, the
            family that decides what SGLang's layer ids mean, and what the judge compares with.
        verifier_name: path or hub id of the verifier that servers are told; default: what the source says, else the
            path of `verifier`.
        aux_layer_ids: states the drafter was trained on, where the source does not say it or can be read in two ways.
        max_mb_per_s: read no faster than that, in 10^6 bytes.
        check_stop: called now and then; raises where the conversion is not wanted any more.

    Raises:
        CheckpointError: the source is damaged or unclear, or the format cannot express it; nothing is written.
        BadInput: the destination is not empty or inside of the source, or the verifier lacks what is needed.
        OSError: the disk is full or the like; nothing is left behind.
    """
    _check_destination(destination)
    meaning = read_meaning(source, verifier, aux_layer_ids)
    if meaning.path.resolve() in destination.resolve().parents:
        raise BadInput(f"{destination}: lies inside the checkpoint that is read. Name another directory")
    plan = _plan(meaning, target, verifier, verifier_name)
    stream = Stream(None if max_mb_per_s is None else max_mb_per_s * 1e6)
    with _published(destination) as temp:
        write_config(temp / "config.json", plan.config)
        if target == "speculators":
            write_config(temp / "generation_config.json", generation_config(meaning.source.config))
        starts = lay_out(temp / _WEIGHTS, plan.tensors)
        _check_servers(meaning, target, _servers(meaning, temp))
        fill(temp / _WEIGHTS, plan.tensors, starts, stream, check_stop)
        (temp / _WEIGHTS).chmod((temp / "config.json").stat().st_mode)
        write_manifest(temp, epoch=None, step=None, extra={"converted_from": meaning.source.format, "to": target})
        verdict = judge(temp, verifier=verifier, max_mb_per_s=max_mb_per_s)
        if not verdict.usable:
            raise CheckpointError(f"{meaning.path}: would be {verdict.verdict} as {target}: {verdict.errors()}")
        _check_servers(meaning, target, verdict.servers)
    return Conversion(destination, target, meaning.source.format, verdict, (*meaning.notes, *plan.notes))


@dataclass(frozen=True)
class _Plan:
    config: dict[str, Any]
    tensors: dict[str, RawTensor]
    notes: list[str]


def _plan(meaning: Meaning, target: ServedFormat, verifier: Path | None, verifier_name: str | None) -> _Plan:
    """Config and tensors as the target has them; no byte is read.

    Raises:
        CheckpointError: the target cannot say it.
        BadInput: the verifier lacks what is needed.
    """
    if target == "speculators" and meaning.source.config.mla is not None:
        raise CheckpointError(f"{meaning.path}: the speculators format has no latent attention; take vllm or both")
    notes: list[str] = []
    entries = dict(meaning.weights.entries)
    config = meaning.source.config.model_copy(update={"aux_layer_ids": meaning.states})
    for name in ("d2t", "t2d"):
        entries.pop(name, None)
    # Only the official module loads an embedding itself, and none where the aux states have another width.
    wide = meaning.parts.target_hidden_size is not None
    if target == "speculators" or (target == "eagle" and wide):
        _borrow(meaning, entries, "embed_tokens.weight", config.vocab_size, target, notes)
    if target != "vllm" or (meaning.verifier is not None and meaning.verifier.head is not None):
        _borrow(meaning, entries, "lm_head.weight", config.vocab_size, target, notes)
    tensors = {name: copied(entry, _rows(config, name)) for name, entry in entries.items()}
    _in_order(meaning, entries, tensors, notes)
    if config.draft_vocab_size != config.vocab_size:
        tensors |= _map(meaning)
    named = {new: tensor for name, tensor in sorted(tensors.items()) for new in _names(name, target, config)}
    serving = _serving(meaning, verifier, verifier_name)
    return _Plan(_config(meaning, target, config, serving), named, notes)


def _borrow(
    meaning: Meaning, entries: dict[str, Entry], name: str, rows: int, target: ServedFormat, notes: list[str]
) -> None:
    """Take a tensor from the verifier where the checkpoint leaves it there."""
    if name in entries:
        return
    what = "embedding" if name == "embed_tokens.weight" else "head"
    if meaning.verifier is None:
        raise CheckpointError(
            f"{meaning.path}: holds no {name}, and {target} needs it: give the verifier, whose {what} it uses"
        )
    location = meaning.verifier.embedding if what == "embedding" else meaning.verifier.head
    if location is None or not _fits(location, rows, meaning.source.config.hidden_size):
        raise BadInput(
            f"{meaning.verifier.config.file.parent}: its {what} cannot be taken over as {name} [{rows}, "
            f"{meaning.source.config.hidden_size}]: it is missing, quantised or of another shape"
        )
    entries[name] = Entry(name, location.file, location.info.dtype, location.info.shape, location)
    notes.append(f"{name} is the verifier's {what}, {location.name} of {location.file.name}")


def _fits(location: TensorLocation, rows: int, width: int) -> bool:
    info = location.info
    return info.dtype in DTYPES and len(info.shape) == 2 and info.shape[0] >= rows and info.shape[1] == width


def _rows(config: DrafterConfig, name: str) -> int | None:
    """Rows of what may come from a verifier, whose matrices are padded at the end."""
    sizes = {"embed_tokens.weight": config.vocab_size, "lm_head.weight": config.draft_vocab_size}
    return sizes.get(name)


def _in_order(meaning: Meaning, entries: dict[str, Entry], tensors: dict[str, RawTensor], notes: list[str]) -> None:
    """Put the rows of lm_head into the order of the tokens they stand for."""
    order = sorted(range(len(meaning.targets)), key=meaning.targets.__getitem__)
    if order == list(range(len(order))) or "lm_head.weight" not in meaning.weights.entries:
        return
    tensors["lm_head.weight"] = permuted(entries["lm_head.weight"], order)
    notes.append("draft ids were put into the order of verifier tokens, rows of lm_head.weight with them")


def _map(meaning: Meaning) -> dict[str, RawTensor]:
    """d2t as offsets of ascending tokens, and t2d, which vLLM and SGLang pass over and the judge does not."""
    tokens = sorted(meaning.targets)
    kept = bytearray(meaning.source.config.vocab_size)
    for token in tokens:
        kept[token] = 1
    offsets = array("q", (token - index for index, token in enumerate(tokens)))
    return {"d2t": made("I64", offsets.tobytes(), len(offsets)), "t2d": made("BOOL", bytes(kept), len(kept))}


def _names(name: str, target: ServedFormat, config: DrafterConfig) -> Iterator[str]:
    """What a tensor is called in a format; twice where two servers look for it under two names."""
    head, _, rest = name.partition(".")
    index, _, part = rest.partition(".")
    further_norm = head == "layers" and index != "0" and part == "input_layernorm.weight" and config.mla is None
    if further_norm and target in ("sglang", "both"):
        yield f"layers.{index}.hidden_norm.weight"
    if target in _MIDLAYER and name.startswith("layers.0."):
        yield f"midlayer.{part}"
    elif not (further_norm and target == "sglang"):
        yield name


def _serving(meaning: Meaning, verifier: Path | None, name: str | None) -> Serving | None:
    """What servers are told of the verifier; None where nothing is known."""
    raw = meaning.source.raw
    found = name or meaning.source.verifier_name or (None if verifier is None else str(verifier))
    if found is None:
        return None
    section, kept = _object(raw.get("speculators_config")), _object(raw.get(KEPT_KEY))
    methods = section.get("proposal_methods")
    method = _object(methods[0]) if isinstance(methods, list) and methods else kept
    classes = (_object(section.get("verifier")) or kept).get("architectures")
    if meaning.verifier is not None:
        classes = meaning.verifier.config.architectures
    serving = Serving(found, tuple(map(str, classes)) if isinstance(classes, (list, tuple)) else ())
    tokens = method.get("speculative_tokens")
    return replace(serving, speculative_tokens=tokens) if type(tokens) is int else serving


def _object(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _config(meaning: Meaning, target: ServedFormat, config: DrafterConfig, serving: Serving | None) -> dict[str, Any]:
    """config.json of the target.

    Raises:
        CheckpointError: the target cannot say it.
    """
    parts = meaning.parts
    if target == "speculators":
        if serving is None:
            raise CheckpointError(
                f"{meaning.path}: the speculators format names the verifier, and nothing here does: give the verifier "
                "or verifier_name, its hub id"
            )
        said = serving.verifier, serving.architectures, serving.speculative_tokens
        return speculators_config(config, *said, parts)
    if target == "eagle":
        if gaps := _official_gaps(meaning, config):
            raise CheckpointError(f"{meaning.path}: the official EAGLE module cannot express {'; '.join(gaps)}")
        return official_config(config, parts, serving)
    nested = None
    if target in ("sglang", "both") and meaning.states is not None:
        nested = sglang_ids(meaning.states, meaning.family, meaning.layers)
        if nested is None:
            why = "no verifier is given, and what they mean depends on its family"
            why = f"a verifier of family {meaning.family} cannot be asked for them" if meaning.family else why
            raise CheckpointError(f"{meaning.path}: states {list(meaning.states)} cannot be told to SGLang: {why}")
    return flat_config(config, nested_ids=nested, parts=parts, serving=serving)


def _official_gaps(meaning: Meaning, config: DrafterConfig) -> list[str]:
    """What SafeAILab/EAGLE's module would compute otherwise. Source: eagle/model/cnets.py at cb7e084."""
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "attention_bias", "qk_norm")
    gaps = [f"{flag}: true" for flag in flags if dict(config)[flag]]
    gaps += [f"{extra}: true" for extra in sorted(meaning.source.extras)]
    if config.mla is not None:
        gaps.append("latent attention")
    if config.num_hidden_layers != 1:
        gaps.append(f"{config.num_hidden_layers} layers (it has one)")
    if config.num_aux_states != 3:
        gaps.append(f"{config.num_aux_states} aux states (it takes 3)")
    if config.sliding_window is not None:
        gaps.append(f"a sliding window of {config.sliding_window}")
    gaps += _rope_gap(config.rope)
    if meaning.states is not None:
        fed = None if meaning.layers is None else default_states(meaning.layers)
        if fed is None:
            gaps.append(
                f"the states {list(meaning.states)}: it takes 2, N//2, N-3 of N layers, which the verifier would tell"
            )
        elif fed != meaning.states:
            gaps.append(f"the states {list(meaning.states)}: of this verifier it always takes {list(fed)}")
    return gaps


def _rope_gap(rope: dict[str, Any]) -> list[str]:
    """Scaled rope is known to it as linear or dynamic, with a factor alone and over the base 10000."""
    kind = rope["rope_type"]
    if kind == "default":
        return []
    known = kind in ("linear", "dynamic") and rope.keys() == {"rope_type", "rope_theta", "factor"}
    if known and rope["rope_theta"] == 10000.0 and float(rope["factor"]) > 1:
        return []
    return [f"rope {rope}"]


def _servers(meaning: Meaning, path: Path) -> tuple[Servability, ...]:
    """What servers will do with a directory whose file is laid out, but not filled."""
    return judge_servers(describe_drafter(path), open_drafter_weights(path), meaning.verifier)


def _check_servers(meaning: Meaning, target: ServedFormat, servers: tuple[Servability, ...]) -> None:
    """Refuse what the target's own server would not serve as it was trained."""
    for server in servers:
        if server.server in SERVERS[target] and server.outcome != "loads":
            reasons = [reason for reason in server.reasons if reason.effect != "note"]
            why = "; ".join(f"[{reason.rule}] {reason.message}. {reason.fix}" for reason in reasons)
            does = "would refuse it" if server.outcome == "refuses" else "would load it wrongly"
            raise CheckpointError(f"{meaning.path}: as {target}, {server.version} {does}: {why}")


def _check_destination(destination: Path) -> None:
    if destination.is_symlink() or (destination.exists() and not destination.is_dir()):
        raise BadInput(f"{destination}: exists and is no directory")
    if destination.is_dir() and any(destination.iterdir()):
        raise BadInput(f"{destination}: is not empty; nothing is written over. Name another directory")
    if not destination.resolve().parent.is_dir():
        raise BadInput(f"{destination.parent}: no such directory")


@contextmanager
def _published(destination: Path) -> Iterator[Path]:
    """A directory to write into, which takes its place once the body is through; removed where it fails."""
    final = destination.resolve()
    for stale in final.parent.glob(f".convert-{final.name}-*.tmp"):
        if not _running(stale):
            shutil.rmtree(stale)
    temp = final.with_name(f".convert-{final.name}-{os.getpid()}.tmp")
    temp.mkdir()
    try:
        yield temp
        fsync_directory(temp)
        temp.rename(final)  # replaces an empty directory, and nothing else
    except OSError as error:
        if error.filename is None:
            raise OSError(error.errno, error.strerror, str(temp)) from error
        raise
    finally:
        shutil.rmtree(temp, ignore_errors=True)
    fsync_directory(final.parent)


def _running(stale: Path) -> bool:
    """Whether the process that writes a leftover still lives."""
    number = stale.name.removesuffix(".tmp").rpartition("-")[2]
    return number.isdigit() and Path(f"/proc/{number}").exists()
