"""Which safetensors file of a model directory holds which tensor. Standard library only.

    an index (model.safetensors.index.json)   it is followed; weight files it does not list are warned about
    no index, model.safetensors               that file
    no index, model-00001-of-0000n...         all n of them
    no index, one other .safetensors          that file, with a warning

Every header is read and checked.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from eagle3_core.contract.headers import TensorFile, TensorInfo, read_header
from eagle3_core.contract.jsonfiles import read_json_object
from eagle3_core.errors import BadInput, NameClash

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

_SHARD = re.compile(r"^(?P<stem>.+)-(?P<number>\d+)-of-(?P<total>\d+)\.safetensors$")
_SIDE_FILES = re.compile(r"^(adapter_model|training_args|optimizer|scheduler)")
_PICKLES = ("*.bin", "*.pt", "*.pth")


@dataclass(frozen=True, slots=True)
class TensorLocation:
    """One tensor: its name in the file, the file, and where in it."""

    name: str
    file: Path
    info: TensorInfo

    def __str__(self) -> str:
        """`name file shape dtype`, the line printed at the start of a job."""
        return f"{self.name} {self.file.name} {list(self.info.shape)} {self.info.dtype}"


@dataclass(frozen=True)
class WeightFiles:
    """The tensors of a model directory, every header read and checked; `unlisted` lie in its files beside an index."""

    path: Path
    tensors: dict[str, TensorLocation]
    files: tuple[Path, ...]
    warnings: list[tuple[str, str]] = field(default_factory=list)
    unlisted: tuple[TensorLocation, ...] = ()


def read_weight_files(path: Path) -> WeightFiles:
    """All tensors of a model directory by name.

    Raises:
        BadInput: no safetensors weights, shards missing, or an index that is stale or broken.
        NameClash: shards without an index hold one name twice.
        UnreadableFile: a weight file that is not what its header says.
    """
    if not path.is_dir():
        raise BadInput(f"{path}: no such directory" if not path.exists() else f"{path}: is not a directory")
    index = _index_file(path)
    if index is not None:
        return _by_index(path, index)
    files, warnings = _files_without_index(path)
    tensors: dict[str, TensorLocation] = {}
    for file in files:
        for name, info in read_header(file).tensors.items():
            if name in tensors:
                raise NameClash(f"{path}: tensor {name!r} is in {tensors[name].file.name} and in {file.name}")
            tensors[name] = TensorLocation(name, file, info)
    return WeightFiles(path, tensors, tuple(files), warnings)


def _index_file(path: Path) -> Path | None:
    if (path / INDEX_NAME).exists() or (path / INDEX_NAME).is_symlink():
        return path / INDEX_NAME
    others = sorted(path.glob("*.safetensors.index.json"))
    if len(others) > 1:
        raise BadInput(f"{path}: several weight indexes and no {INDEX_NAME}: {', '.join(f.name for f in others)}")
    if others and (path / SINGLE_NAME).exists():
        return None
    return others[0] if others else None


def _by_index(path: Path, index: Path) -> WeightFiles:
    weight_map = _weight_map(index)
    listed: dict[str, set[str]] = {}
    for name, shard in weight_map.items():
        listed.setdefault(shard, set()).add(name)
    shards = sorted(listed)
    missing = [name for name in shards if not (path / name).exists()]
    if missing:
        raise BadInput(
            f"{path}: {len(missing)} of {len(shards)} files listed in {index.name} are missing: {', '.join(missing)}"
        )
    headers = {name: read_header(path / name) for name in shards}
    for shard, header in headers.items():
        _check_not_stale(index, shard, header, listed[shard])
    tensors = {
        name: TensorLocation(name, headers[shard].path, headers[shard].tensors[name])
        for name, shard in weight_map.items()
    }
    unlisted = tuple(
        TensorLocation(name, header.path, info)
        for shard, header in headers.items()
        for name, info in header.tensors.items()
        if weight_map.get(name) != shard
    )
    warnings = _unlisted(path, index, set(shards), sorted(one.name for one in unlisted if one.name not in weight_map))
    return WeightFiles(path, tensors, tuple(path / name for name in shards), warnings, unlisted)


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise BadInput(f"{index}: has no weight_map with tensors in it")
    holders = {shard: name for name, shard in weight_map.items() if isinstance(shard, str) and shard}
    if wrong := [name for name, shard in weight_map.items() if not isinstance(shard, str) or not shard]:
        raise BadInput(f"{index}: weight_map[{wrong[0]!r}] is {weight_map[wrong[0]]!r}, not a file name")
    for shard, name in holders.items():
        parts = PurePosixPath(shard)
        if parts.is_absolute() or ".." in parts.parts or "\0" in shard:
            raise BadInput(f"{index}: weight_map[{name!r}] is {shard!r}, which lies outside the directory")
    return weight_map


def _check_not_stale(index: Path, shard: str, header: TensorFile, listed: set[str]) -> None:
    absent = sorted(listed - header.tensors.keys())
    if absent:
        raise BadInput(
            f"{index}: stale index: it lists {_some(absent)} in {shard}, which does not hold "
            f"{'it' if len(absent) == 1 else 'them'}; the index and the weight files are of different versions"
        )


def _unlisted(path: Path, index: Path, shards: set[str], extra: list[str]) -> list[tuple[str, str]]:
    """Warnings about weights that lie beside an index and are not in it."""
    warnings = []
    stray = sorted(f.name for f in path.glob("*.safetensors") if f.name not in shards and not _SIDE_FILES.match(f.name))
    if stray:
        warnings.append(
            ("unlisted_weight_file", f"{path}: {', '.join(stray)} not listed in {index.name}; the index is followed")
        )
    if extra:
        warnings.append(
            ("unlisted_tensor", f"{path}: {len(extra)} tensors in the shards are not in {index.name}: {_some(extra)}")
        )
    return warnings


def _files_without_index(path: Path) -> tuple[list[Path], list[tuple[str, str]]]:
    single = path / SINGLE_NAME
    found = sorted(f for f in path.glob("*.safetensors") if not _SIDE_FILES.match(f.name))
    if single.exists() or single.is_symlink():
        stray = [f.name for f in found if f != single]
        note = f"{path}: {', '.join(stray)} beside {SINGLE_NAME} and no index; only {SINGLE_NAME} is read"
        return [single], [("unlisted_weight_file", note)] if stray else []
    if not found:
        raise BadInput(_no_weights(path))
    shards = [(_SHARD.match(f.name), f) for f in found]
    if all(match for match, _ in shards):
        return _whole_set(path, [f for _, f in shards]), [
            ("no_index", f"{path}: no {INDEX_NAME}; all {len(found)} shards are read instead")
        ]
    if len(found) == 1:
        return found, [("odd_weight_file", f"{path}: no {SINGLE_NAME} and no index; {found[0].name} is read")]
    raise BadInput(
        f"{path}: no {INDEX_NAME}, no {SINGLE_NAME}, and several weight files: {', '.join(f.name for f in found)}"
    )


def _whole_set(path: Path, files: list[Path]) -> list[Path]:
    """The shards, once it is sure that they are one set and none is missing."""
    matches = [match for f in files if (match := _SHARD.match(f.name))]
    kinds = {(match["stem"], match["total"]) for match in matches}
    if len(kinds) != 1:
        raise BadInput(f"{path}: no {INDEX_NAME}, and shards of several sets: {', '.join(f.name for f in files)}")
    stem, total = next(iter(kinds))
    have = {int(match["number"]) for match in matches}
    if int(total) > len(files) + 10_000:
        raise BadInput(f"{path}: {files[0].name} claims {int(total):,} shards, {len(files)} are there")
    width = len(matches[0]["number"])
    first = 0 if 0 in have else 1
    missing = [
        f"{stem}-{number:0{width}}-of-{total}.safetensors"
        for number in range(first, int(total) + first)
        if number not in have
    ]
    if missing:
        raise BadInput(f"{path}: no {INDEX_NAME}; {len(missing)} of {int(total)} shards missing: {', '.join(missing)}")
    return files


def _no_weights(path: Path) -> str:
    if (path / "adapter_model.safetensors").exists():
        return f"{path}: holds a LoRA adapter alone: merge it into the model it was made for, and give that"
    pickles = sorted(f.name for pattern in _PICKLES for f in path.glob(pattern))
    gguf = sorted(f.name for f in path.glob("*.gguf"))
    message = f"{path}: no weights: neither {INDEX_NAME} nor {SINGLE_NAME} nor another .safetensors file is there"
    if pickles:
        return f"{message}; {_some(pickles)} are pickles: convert the model to safetensors"
    return f"{message}; {_some(gguf)} cannot be read by byte range: convert to safetensors" if gguf else message


def _some(names: list[str], limit: int = 5) -> str:
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
