"""The tensors of a drafter under their canonical names, whatever file and spelling they come in.

    midlayer.* -> layers.0.*     model.* -> *     aux_norm_low / mid / high -> fc_norm.0 / 1 / 2

Pickled files (.bin, .pt) are opened with `weights_only=True`, which executes nothing, and never otherwise.
"""

import pickle
import re
import struct
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from eagle3_core.contract.headers import read_header
from eagle3_core.contract.weight_files import TensorLocation, read_weight_files
from eagle3_core.errors import CheckpointError, UnreadableFile
from eagle3_core.verifier.tensors import load_tensor, tensor_chunks

_PICKLES = ("pytorch_model.bin", "model.bin", "pytorch_model.pt", "model.pt", "draft_model.pt")
RUNTIME_STATE = "training_state.pt"
"""What SpecForge writes while it trains: the drafter's tensors under draft_state_dict, optimizer and position."""
_STATE_KEYS = ("state_dict", "draft_state_dict")

_LEGACY_FC_NORMS = {"aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1", "aux_norm_high": "fc_norm.2"}
_DTYPE_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
}
_DAMAGE = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    struct.error,
)
"""What torch.load raises on damaged bytes; found by flipping them."""

_CHUNK_ELEMENTS = 1 << 24


@dataclass(frozen=True)
class Entry:
    """One tensor: the name in the file, the file, dtype as safetensors spells it, shape."""

    stored_name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    source: TensorLocation | Tensor

    def chunks(self) -> Iterator[Tensor]:
        """Flat pieces in order; each is valid until the next is asked for."""
        if isinstance(self.source, TensorLocation):
            yield from tensor_chunks(self.source)
        else:
            yield from torch.split(self.source.reshape(-1), _CHUNK_ELEMENTS)

    def load(self) -> Tensor:
        """The whole tensor."""
        return load_tensor(self.source) if isinstance(self.source, TensorLocation) else self.source


@dataclass(frozen=True)
class DrafterWeights:
    """All tensors of a drafter by canonical name, and the files they lie in."""

    entries: dict[str, Entry]
    files: tuple[Path, ...]


def canonical_name(name: str) -> str:
    """The name as speculators writes it."""
    name = name.removeprefix("model.")
    name = f"layers.0.{name.removeprefix('midlayer.')}" if name.startswith("midlayer.") else name
    head, dot, rest = name.partition(".")
    return f"{_LEGACY_FC_NORMS[head]}{dot}{rest}" if head in _LEGACY_FC_NORMS else name


def open_drafter_weights(path: Path) -> DrafterWeights:
    """The tensors of a checkpoint directory or of one .safetensors file; nothing is loaded from safetensors yet.

    Raises:
        CheckpointError: no weight file, or two names for one tensor.
        UnreadableFile: a file that is not what its header says, or a pickle that wants to run code.
    """
    stored, files = _stored(path)
    entries: dict[str, Entry] = {}
    clashes = []
    for entry in stored:
        name = canonical_name(entry.stored_name)
        if name in entries:
            clashes.append(f"{entries[name].stored_name} and {entry.stored_name}")
        entries[name] = entry
    if clashes:
        raise CheckpointError(f"{path}: two names for one tensor: {'; '.join(sorted(clashes))}")
    return DrafterWeights(entries, files)


def read_drafter_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a drafter by canonical name, on the CPU, in the dtype of the file.

    Raises:
        CheckpointError: no weight file, or two names for one tensor (both are listed).
        UnreadableFile: a damaged file, or a pickle that wants to run code.
    """
    return {name: entry.load() for name, entry in open_drafter_weights(path).entries.items()}


def load_pickle(path: Path) -> object:
    """The content of a torch.save file, tensors mapped from the file where its format allows.

    Raises:
        UnreadableFile: damaged, or it holds more than tensors and plain containers.
    """
    if not path.is_file():
        raise UnreadableFile(path, "missing", "no such file" if not path.exists() else "is not a regular file")
    with path.open("rb") as file:
        head = file.read(40)
    if head.startswith(b"version https://git-lfs"):
        raise UnreadableFile(path, "lfs_pointer", "is a Git LFS pointer, not the file; fetch it with `git lfs pull`")
    if not head:
        raise UnreadableFile(path, "empty", "empty file (0 bytes)")
    try:
        with warnings.catch_warnings():
            # What torch thinks of the protocol of a file under suspicion is no news to the user.
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True, mmap=head.startswith(b"PK"))
    except pickle.UnpicklingError as error:
        if "nsupported" in str(error) or "GLOBAL" in str(error):
            reason = "holds more than tensors and plain data and was not opened"
            raise UnreadableFile(path, "unsafe_pickle", f"{reason} ({_asked_for(error)})") from error
        raise UnreadableFile(path, "damaged_pickle", f"is damaged: {_first_line(error)}") from error
    except _DAMAGE as error:
        size = path.stat().st_size
        raise UnreadableFile(path, "damaged_pickle", f"is damaged ({size:,} bytes): {_first_line(error)}") from error


def _stored(path: Path) -> tuple[list[Entry], tuple[Path, ...]]:
    """Entries under the names in the file."""
    if path.is_file():
        return _pickled(path) if path.suffix in (".bin", ".pt") else _single(path)
    if any(path.glob("*.safetensors")) or any(path.glob("*.safetensors.index.json")):
        weights = read_weight_files(path)
        return [_entry(location) for location in weights.tensors.values()], weights.files
    pickles = [path / name for name in (*_PICKLES, RUNTIME_STATE) if (path / name).is_file()]
    if not pickles:
        if not path.is_dir():
            raise CheckpointError(f"{path}: no such file or directory")
        raise CheckpointError(f"{path}: no weights: no .safetensors file and none of {', '.join(_PICKLES)}")
    return _pickled(pickles[0])


def _single(path: Path) -> tuple[list[Entry], tuple[Path, ...]]:
    from_header = read_header(path).tensors
    return [_entry(TensorLocation(name, path, info)) for name, info in from_header.items()], (path,)


def _pickled(path: Path) -> tuple[list[Entry], tuple[Path, ...]]:
    data = load_pickle(path)
    if isinstance(data, Mapping):
        data = next((data[key] for key in _STATE_KEYS if isinstance(data.get(key), Mapping)), data)
    if not isinstance(data, Mapping) or not all(isinstance(name, str) for name in data):
        raise CheckpointError(f"{path}: holds {type(data).__name__}, not tensors by name")
    entries = [
        Entry(name, path, _DTYPE_NAMES.get(value.dtype, str(value.dtype)), tuple(value.shape), value.detach())
        for name, value in data.items()
        if isinstance(value, Tensor) and value.layout == torch.strided
    ]
    if not entries:
        raise UnreadableFile(path, "no_tensors", "no tensors in the file")
    return entries, (path,)


def _entry(location: TensorLocation) -> Entry:
    return Entry(location.name, location.file, location.info.dtype, location.info.shape, location)


def _asked_for(error: BaseException) -> str:
    """What the pickle wanted to import or call, out of torch's long advice."""
    text = next((line for line in str(error).splitlines() if "GLOBAL" in line or "nsupported" in line), "")
    found = re.search(r"GLOBAL ([\w.]+)|(Unsupported [^.]*)", text)
    return f"it asks for {found[1]}" if found and found[1] else found[2] if found else _first_line(error)


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:200] if text else type(error).__name__
