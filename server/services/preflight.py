"""What can be known to be wrong before anything starts, from headers and sizes; no tensor is read."""

import os
from collections.abc import Iterator
from pathlib import Path

from eagle3_core.contract.access import unusable
from eagle3_core.contract.params import ExtractParams, PrepareParams, StageParams, TrainParams
from eagle3_core.contract.verifier_files import VerifierFiles
from eagle3_core.errors import Eagle3Error
from server.errors import FieldError
from server.services.models import read_verifier

_FILES = ("conversations", "prompts")
_READ_WHOLE = ("checkpoint", "previous", "finetune_from", "verifier", "data_dir", "prepared_dir", "vocab_map_dir")
_READ = frozenset({".safetensors", ".json", ".pt", ".bin"})


def check_content(params: StageParams, pointer: str) -> Iterator[FieldError]:
    """Faults in what the parameters point to. Paths that do not exist yet are passed over."""
    named = params.paths()
    for field, (role, path) in named.items():
        if role == "input" and field in _READ_WHOLE and (fault := _unreadable_inside(Path(path))) is not None:
            yield FieldError(f"{pointer}/{field}", fault)
    for field in _FILES:
        if field in named:
            yield from _check_file(Path(named[field][1]), f"{pointer}/{field}")
    verifier = named.get("verifier")
    if verifier is None or not Path(verifier[1]).exists():
        return
    try:
        files = read_verifier(Path(verifier[1]))
    except Eagle3Error as error:
        yield FieldError(f"{pointer}/verifier", str(error))
        return
    except OSError as error:
        yield FieldError(f"{pointer}/verifier", f"cannot be read: {error}")
        return
    yield from _check_against(files, params, pointer)


def _unreadable_inside(directory: Path) -> str | None:
    """The first file of a directory that a job would read and may not, with owner and mode."""
    try:
        entries = sorted(directory.iterdir()) if directory.is_dir() else []
    except OSError:
        return None  # said of the directory itself
    faults = (unusable(entry, os.R_OK) for entry in entries if entry.suffix in _READ)
    return next((fault for fault in faults if fault is not None), None)


def _check_file(path: Path, pointer: str) -> Iterator[FieldError]:
    if not path.exists():
        return
    if not path.is_file():
        yield FieldError(pointer, f"{path} is not a file")
        return
    try:
        with path.open("rb") as file:
            if not any(line.strip() for line in _first_lines(file.read(1 << 20))):
                yield FieldError(pointer, f"{path} is empty: it holds no conversation")
    except OSError as error:
        yield FieldError(pointer, f"cannot be read: {error}")


def _first_lines(data: bytes) -> list[bytes]:
    return data.split(b"\n")


def _check_against(files: VerifierFiles, params: StageParams, pointer: str) -> Iterator[FieldError]:
    """Numbers of the request that contradict the verifier."""
    draft = params.draft_vocab_size if isinstance(params, PrepareParams | TrainParams) else None
    if draft is not None and draft > files.vocab_size:
        text = f"{draft} is more than the verifier's vocabulary of {files.vocab_size}"
        yield FieldError(f"{pointer}/draft_vocab_size", text)
    layers = params.aux_layer_ids if isinstance(params, ExtractParams | TrainParams) else None
    beyond = [layer for layer in layers or () if not 0 <= layer <= files.num_hidden_layers]
    if beyond:
        text = f"{beyond} not in 0..{files.num_hidden_layers}, the verifier's layers"
        yield FieldError(f"{pointer}/aux_layer_ids", text)
