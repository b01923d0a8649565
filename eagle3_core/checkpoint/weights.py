"""The tensors of a drafter under their canonical names, whatever file and spelling they come in. No tensor is read.

    midlayer.* -> layers.0.*     model.* -> *     aux_norm_low / mid / high -> fc_norm.0 / 1 / 2
    layers.i.hidden_norm -> layers.i.input_layernorm for i > 0, where SGLang norms with the one, vLLM with the other

Files of torch.save (.bin, .pt) are never unpickled: see archive.py.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle3_core.checkpoint.archive import Archive, ArchiveTensor, read_archive
from eagle3_core.contract.headers import read_header
from eagle3_core.contract.jsonfiles import read_json_object
from eagle3_core.contract.weight_files import TensorLocation, read_weight_files
from eagle3_core.errors import CheckpointError, NameClash, UnreadableFile

RUNTIME_STATE = "training_state.pt"
"""What SpecForge writes while it trains: the drafter's tensors under draft_state_dict, optimizer and position."""

_PICKLES = ("pytorch_model.bin", "model.bin", "pytorch_model.pt", "model.pt", "draft_model.pt")
_PICKLE_INDEX = "pytorch_model.bin.index.json"
_PICKLE_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d+)-of-(?P<total>\d+)\.(bin|pt)")
_STATE_KEYS = ("state_dict", "draft_state_dict")
_FURTHER_NORM = re.compile(r"layers\.[1-9]\d*\.hidden_norm\.weight")
_LEGACY_FC_NORMS = {"aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1", "aux_norm_high": "fc_norm.2"}


@dataclass(frozen=True)
class Entry:
    """One tensor: the name in the file, the file, dtype as safetensors spells it, shape.

    location: its byte range; None where its elements do not lie in order, which torch.save allows.
    """

    stored_name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    location: TensorLocation | None


@dataclass(frozen=True)
class DrafterWeights:
    """All tensors of a drafter by canonical name, the files they lie in, and those of torch.save among them.

    copies: canonical name -> a second entry of the same values, which a directory for both servers has.
    unlisted: canonical names of those that the index leaves out; servers load all that lies in the files it names.
    """

    entries: dict[str, Entry]
    files: tuple[Path, ...]
    archives: dict[Path, Archive]
    copies: dict[str, Entry] = field(default_factory=dict)
    unlisted: tuple[str, ...] = ()


def canonical_name(name: str) -> str:
    """The name as speculators writes it."""
    name = name.removeprefix("model.")
    name = f"layers.0.{name.removeprefix('midlayer.')}" if name.startswith("midlayer.") else name
    head, dot, rest = name.partition(".")
    return f"{_LEGACY_FC_NORMS[head]}{dot}{rest}" if head in _LEGACY_FC_NORMS else name


def open_drafter_weights(path: Path) -> DrafterWeights:
    """The tensors of a checkpoint directory or of one weight file.

    Raises:
        CheckpointError: no weight file, or shards missing.
        NameClash: one tensor twice, under two names or in two files.
        UnreadableFile: a file that is not what its header says, or a pickle that wants to run code.
    """
    stored, files, archives, unlisted = _stored(path)
    entries: dict[str, Entry] = {}
    clashes = []
    for entry in stored:
        name = canonical_name(entry.stored_name)
        if name in entries:
            clashes.append(_both(entries[name], entry))
        entries[name] = entry
    copies = _join_further_norms(entries, clashes)
    if clashes:
        raise NameClash(f"{path}: two names for one tensor, or two files with it: {'; '.join(sorted(clashes))}")
    return DrafterWeights(entries, files, archives, copies, tuple(sorted(map(canonical_name, unlisted))))


def _join_further_norms(entries: dict[str, Entry], clashes: list[str]) -> dict[str, Entry]:
    """Bring the norm of layers above 0 under one name; returns the copies."""
    copies = {}
    for name in [name for name in entries if _FURTHER_NORM.fullmatch(name)]:
        entry, usual = entries.pop(name), name.replace("hidden_norm", "input_layernorm")
        if usual not in entries:
            entries[usual] = entry
        elif _same_bytes(entry, entries[usual]):
            copies[usual] = entry
        else:
            clashes.append(f"{_both(entries[usual], entry)}, which differ")
    return copies


def _both(one: Entry, other: Entry) -> str:
    names = one.stored_name, other.stored_name
    places = (f" in {one.file.name}", f" in {other.file.name}") if one.file != other.file else ("", "")
    return f"{names[0]}{places[0]} and {names[1]}{places[1]}"


def _same_bytes(one: Entry, other: Entry) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape) or one.location is None or other.location is None:
        return False
    return _bytes(one.location) == _bytes(other.location)


def _bytes(location: TensorLocation) -> bytes:
    with location.file.open("rb") as file:
        file.seek(location.info.start)
        return file.read(location.info.end - location.info.start)


def has_weights(path: Path) -> bool:
    """Whether a directory holds anything that could be a drafter's weights."""
    return any(path.glob("*.safetensors")) or any(path.glob("*.bin")) or bool(_pickle_files(path))


def state_tensors(content: object) -> dict[str, ArchiveTensor] | None:
    """The tensors by name that a torch.save file holds, under a key of its own or at the top; None: it is no such."""
    if isinstance(content, Mapping):
        content = next((content[key] for key in _STATE_KEYS if isinstance(content.get(key), Mapping)), content)
    if not isinstance(content, Mapping) or not all(isinstance(name, str) for name in content):
        return None
    return {str(name): value for name, value in content.items() if isinstance(value, ArchiveTensor)}


def _stored(path: Path) -> tuple[list[Entry], tuple[Path, ...], dict[Path, Archive], list[str]]:
    """Entries under the names in the file, the files, those of torch.save, and names that an index leaves out."""
    if path.is_file():
        if path.suffix in (".bin", ".pt"):
            return *_pickled(path, [path]), []
        tensors = read_header(path).tensors
        return [_entry(TensorLocation(name, path, info)) for name, info in tensors.items()], (path,), {}, []
    if any(path.glob("*.safetensors")) or any(path.glob("*.safetensors.index.json")):
        weights = read_weight_files(path)
        stored = [_entry(location) for location in (*weights.tensors.values(), *weights.unlisted)]
        return stored, weights.files, {}, [one.name for one in weights.unlisted]
    files = _pickle_files(path)
    if not files:
        if not path.is_dir():
            raise CheckpointError(f"{path}: no such file or directory")
        raise CheckpointError(f"{path}: no weights: no .safetensors file and none of {', '.join(_PICKLES)}")
    pickled = _pickled(path, files)
    if (path / _PICKLE_INDEX).is_file():
        held = {(entry.stored_name, entry.file.name) for entry in pickled[0]}
        if absent := sorted(set(_weight_map(path / _PICKLE_INDEX).items()) - held):
            raise CheckpointError(f"{path / _PICKLE_INDEX}: stale index: {absent[0][0]} is not in {absent[0][1]}")
    return *pickled, []


def _pickle_files(path: Path) -> list[Path]:
    """The torch.save files of a directory that hold its weights: by index, by name, or by the numbers of shards."""
    if (path / _PICKLE_INDEX).is_file():
        return _indexed(path)
    for name in (*_PICKLES, RUNTIME_STATE):
        if (path / name).is_file():
            return [path / name]
    shards = {file: found for file in sorted(path.glob("*-of-*")) if (found := _PICKLE_SHARD.fullmatch(file.name))}
    for found in shards.values():
        total = int(found["total"])
        if len(shards) != total:
            raise CheckpointError(f"{path}: {len(shards)} of {total} shards are there, beside {found[0]}")
    return list(shards)


def _indexed(path: Path) -> list[Path]:
    index = path / _PICKLE_INDEX
    names = sorted(set(_weight_map(index).values()))
    if outside := [name for name in names if Path(name).name != name]:
        raise CheckpointError(f"{index}: names {outside[0]!r}, which is not a file of this directory")
    if missing := [name for name in names if not (path / name).exists()]:
        raise CheckpointError(f"{path}: {len(missing)} of {len(names)} files of {index.name} missing: {missing[0]}")
    return [path / name for name in names]


def _weight_map(index: Path) -> dict[str, str]:
    weight_map: Any = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(f, str) for f in weight_map.values()):
        raise CheckpointError(f"{index}: has no weight_map of tensors to files")
    return weight_map


def _pickled(path: Path, files: list[Path]) -> tuple[list[Entry], tuple[Path, ...], dict[Path, Archive]]:
    entries: dict[str, Entry] = {}
    archives: dict[Path, Archive] = {}
    for file in files:
        archives[file] = read_archive(file)
        tensors = state_tensors(archives[file].content)
        if tensors is None:
            raise CheckpointError(f"{file}: holds {type(archives[file].content).__name__}, not tensors by name")
        for name, tensor in tensors.items():
            if name in entries:
                raise NameClash(f"{path}: tensor {name!r} is in {entries[name].file.name} and in {file.name}")
            location = None if tensor.info is None else TensorLocation(name, file, tensor.info)
            entries[name] = Entry(name, file, tensor.dtype, tensor.shape, location)
    if not entries:
        raise UnreadableFile(files[0], "no_tensors", "no tensors in the file")
    return list(entries.values()), tuple(files), archives


def _entry(location: TensorLocation) -> Entry:
    return Entry(location.name, location.file, location.info.dtype, location.info.shape, location)
