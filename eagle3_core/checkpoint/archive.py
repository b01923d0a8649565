"""Files of torch.save, read without torch and without unpickling. Standard library only.

    <name>/data.pkl         a pickle; each tensor in it names a record, an offset, a shape and strides
    <name>/data/<key>       the bytes of one storage, uncompressed, with a CRC-32
    <name>/byteorder        little or big

The pickle is a program for a stack machine. Its instructions are followed here one by one; those that would import or
call anything but a few names of torch end the reading, so that no file can run anything or take more memory than it
has bytes. Tensors come out as byte ranges of the file, for `pread`.

Source: torch 2.13 `torch/serialization.py` and `torch/_utils.py` (_rebuild_tensor_v2, _v3), pickle protocols 2 to 5.
"""

import pickletools
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from eagle3_core.contract.headers import DTYPE_BITS, TensorInfo
from eagle3_core.contract.jsonfiles import LFS_POINTER, not_there
from eagle3_core.errors import UnreadableFile

_MAX_PICKLE_BYTES = 64_000_000
_LOCAL_HEADER = struct.Struct("<4s5H3I2H")
_LEGACY_MAGIC = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""What files of torch.save before 1.6 begin with, behind the protocol."""

_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "bool": "BOOL",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
_STORAGES = {
    "DoubleStorage": "F64",
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
    "ComplexFloatStorage": "C64",
    "UntypedStorage": "U8",
}
_SCALARS = {"F64": "<d", "F32": "<f", "F16": "<e", "I64": "<q", "I32": "<i", "I16": "<h", "U8": "<B", "BOOL": "<?"}


@dataclass(frozen=True, slots=True)
class ArchiveTensor:
    """One tensor of an archive. `info` is its byte range in the file; None where its elements do not lie in order."""

    dtype: str
    shape: tuple[int, ...]
    info: TensorInfo | None


@dataclass(frozen=True)
class Record:
    """The bytes of one storage: where they are in the file, and their CRC-32 (0: not recorded)."""

    start: int
    end: int
    crc: int


@dataclass(frozen=True)
class Archive:
    """What a torch.save file holds: plain containers and numbers, with an ArchiveTensor for each tensor."""

    path: Path
    content: object
    records: tuple[Record, ...]


class _UnsafeError(Exception):
    """An instruction to import or call something."""


@dataclass(frozen=True, slots=True)
class _Name:
    """Something the pickle refers to by module and name; nothing is imported."""

    module: str
    name: str


@dataclass(frozen=True, slots=True)
class _Storage:
    dtype: str
    record: Record


def read_archive(path: Path) -> Archive:
    """The content of a torch.save file; no tensor is read.

    Raises:
        UnreadableFile: damaged, in the format of torch before 1.6, or it holds more than tensors and plain containers.
    """
    head = _head(path)
    if not head.startswith(b"PK"):
        return _plain(path, head)
    try:
        with zipfile.ZipFile(path) as opened, path.open("rb") as raw:
            return _read_zip(path, opened, raw)
    except _UnsafeError as error:
        raise _unsafe(path, error) from error
    except UnreadableFile:
        raise
    except OSError as error:
        raise UnreadableFile(path, "unreadable", f"cannot be read: {error.strerror or error}") from error
    except _DAMAGE as error:
        text = str(error).strip().splitlines()
        what = text[0][:200] if text else type(error).__name__
        raise UnreadableFile(path, "damaged_pickle", f"is damaged ({path.stat().st_size:,} bytes): {what}") from error


def scalar(tensor: ArchiveTensor, path: Path) -> float | None:
    """The value of a tensor of one element, read from the file; None where it is none or its dtype is not a number."""
    if tensor.info is None or tensor.info.count != 1:
        return None
    with path.open("rb") as file:
        file.seek(tensor.info.start)
        raw = file.read(tensor.info.end - tensor.info.start)
    if tensor.dtype == "BF16" and len(raw) == 2:
        return float(struct.unpack("<f", b"\0\0" + raw)[0])
    form = _SCALARS.get(tensor.dtype)
    return float(struct.unpack(form, raw)[0]) if form and len(raw) == struct.calcsize(form) else None


def tensors_in(content: object) -> Iterator[ArchiveTensor]:
    """Every tensor in plain containers, in order."""
    if isinstance(content, ArchiveTensor):
        yield content
    elif isinstance(content, Mapping):
        for value in content.values():
            yield from tensors_in(value)
    elif isinstance(content, (list, tuple)):
        for value in content:
            yield from tensors_in(value)


def _head(path: Path) -> bytes:
    if not path.is_file():
        raise UnreadableFile(path, "missing", "is not a regular file" if path.exists() else not_there(path))
    try:
        with path.open("rb") as file:
            head = file.read(40)
    except OSError as error:
        raise UnreadableFile(path, "unreadable", f"cannot be read: {error.strerror}") from error
    if head.startswith(LFS_POINTER):
        raise UnreadableFile(path, "lfs_pointer", "is a Git LFS pointer, not the file; fetch it with `git lfs pull`")
    if not head:
        raise UnreadableFile(path, "empty", "empty file (0 bytes)")
    return head


def _plain(path: Path, head: bytes) -> Archive:
    """A pickle without an archive around it: judged by what it asks for, since torch.save writes none."""
    if head[2:].startswith(_LEGACY_MAGIC):
        raise UnreadableFile(
            path, "legacy_pickle", "is in the format of torch before 1.6, which cannot be read piece by piece"
        )
    with path.open("rb") as file:
        raw = file.read(_MAX_PICKLE_BYTES)
    try:
        return Archive(path, _interpret(raw, lambda _: _no_storage()), ())
    except _UnsafeError as error:
        raise _unsafe(path, error) from error
    except _DAMAGE as error:
        raise UnreadableFile(
            path, "damaged_pickle", f"is neither a torch.save archive nor a sound pickle ({len(head)} bytes and more)"
        ) from error


def _no_storage() -> _Storage:
    raise ValueError("a tensor outside an archive")


def _unsafe(path: Path, error: _UnsafeError) -> UnreadableFile:
    return UnreadableFile(
        path, "unsafe_pickle", f"holds more than tensors and plain data and was not opened (it asks for {error})"
    )


def _read_zip(path: Path, opened: zipfile.ZipFile, raw: Any) -> Archive:
    entries = {entry.filename: entry for entry in opened.infolist()}
    pickles = [name for name in entries if name == "data.pkl" or name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise UnreadableFile(path, "damaged_pickle", "is a zip archive, but holds no data.pkl as torch.save writes it")
    prefix = pickles[0].removesuffix("data.pkl")
    if entries[pickles[0]].file_size > _MAX_PICKLE_BYTES:
        raise UnreadableFile(path, "damaged_pickle", f"its data.pkl is over {_MAX_PICKLE_BYTES:,} bytes")
    order = entries.get(f"{prefix}byteorder")
    if order is not None and opened.read(order) != b"little":
        raise UnreadableFile(path, "damaged_pickle", "its tensors are not little-endian")
    size = path.stat().st_size
    records: dict[str, Record] = {}

    def storage(reference: object) -> _Storage:
        match reference:
            case ("storage", _Name(module="torch" | "torch.storage", name=kind), str(key), _, int(count)):
                dtype = _STORAGES.get(kind)
                entry = entries.get(f"{prefix}data/{key}")
                if dtype is None or entry is None:
                    raise ValueError(f"storage {key!r} of {kind} is not in the archive")
            case _:
                raise ValueError(f"refers to {str(reference)[:80]}")
        if key not in records:
            records[key] = _record(raw, entry, size)
        record = records[key]
        if not 0 <= count * DTYPE_BITS[dtype] // 8 <= record.end - record.start:
            raise ValueError(f"storage {key!r} should hold {count} {dtype}, has {record.end - record.start} bytes")
        return _Storage(dtype, record)

    content = _interpret(opened.read(pickles[0]), storage)
    return Archive(path, content, tuple(sorted(records.values(), key=lambda record: record.start)))


def _record(raw: Any, entry: zipfile.ZipInfo, size: int) -> Record:
    if entry.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{entry.filename} is compressed")
    raw.seek(entry.header_offset)
    fields = _LOCAL_HEADER.unpack(raw.read(_LOCAL_HEADER.size))
    if fields[0] != b"PK\x03\x04":
        raise ValueError(f"{entry.filename} has no header where the directory says")
    start = entry.header_offset + _LOCAL_HEADER.size + fields[-2] + fields[-1]
    if start + entry.file_size > size:
        raise ValueError(f"{entry.filename} ends at byte {start + entry.file_size:,}, the file has {size:,}")
    return Record(start, start + entry.file_size, entry.CRC)


def _interpret(raw: bytes, storage: Callable[[object], _Storage]) -> object:
    """The object a pickle describes."""
    machine = _Machine(storage)
    for op, argument, _ in pickletools.genops(raw):
        if op.name == "STOP":
            return machine.stack.pop()
        machine.obey(op.name, argument)
    raise ValueError("the pickle has no end")


class _Machine:
    """The stack machine that a pickle is written for, without the instructions that import or call."""

    def __init__(self, storage: Callable[[object], _Storage]) -> None:
        self.stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[object, Any] = {}
        self._storage = storage
        self._known: dict[str, Callable[[Any], None]] = {
            "MARK": lambda _: self._marks.append(len(self.stack)),
            "BINPUT": self._put,
            "LONG_BINPUT": self._put,
            "MEMOIZE": lambda _: self._put(len(self._memo)),
            "BINGET": self._get,
            "LONG_BINGET": self._get,
            "GLOBAL": lambda argument: self.stack.append(_named(*str(argument).split(" ", 1))),
            "STACK_GLOBAL": lambda _: self.stack.append(_named(self.stack.pop(-2), self.stack.pop())),
            "BINPERSID": lambda _: self.stack.append(self._storage(self.stack.pop())),
            "REDUCE": lambda _: self.stack.append(_called(self.stack.pop(-2), self.stack.pop())),
            "BUILD": lambda _: self._drop(),  # attributes of a container, which nobody reads
            "APPEND": lambda _: self._append([self.stack.pop()]),
            "APPENDS": lambda _: self._append(self._above_mark()),
            "SETITEM": lambda _: self._set_items([self.stack.pop(-2), self.stack.pop()]),
            "SETITEMS": lambda _: self._set_items(self._above_mark()),
            "TUPLE": lambda _: self.stack.append(tuple(self._above_mark())),
            "TUPLE1": lambda _: self._tuple(1),
            "TUPLE2": lambda _: self._tuple(2),
            "TUPLE3": lambda _: self._tuple(3),
            "PROTO": lambda _: None,
            "FRAME": lambda _: None,
        }

    def obey(self, name: str, argument: object) -> None:
        """Carry out one instruction."""
        if name in _PUSH:
            self.stack.append(argument)
        elif name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name])
        elif name in _EMPTY:
            self.stack.append(_EMPTY[name]())
        elif (known := self._known.get(name)) is not None:
            known(argument)
        else:
            raise _UnsafeError(f"the instruction {name}")

    def _put(self, place: object) -> None:
        self._memo[place] = self.stack[-1]

    def _get(self, place: object) -> None:
        self.stack.append(self._memo[place])

    def _drop(self) -> None:
        self.stack.pop()

    def _above_mark(self) -> list[Any]:
        mark = self._marks.pop()
        taken = self.stack[mark:]
        del self.stack[mark:]
        return taken

    def _tuple(self, count: int) -> None:
        taken = tuple(self.stack[-count:])
        if len(taken) < count:
            raise ValueError("the stack is empty")
        self.stack[-count:] = [taken]

    def _append(self, taken: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, list):
            raise ValueError("appends to what is no list")
        target.extend(taken)

    def _set_items(self, taken: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict):
            raise ValueError("sets items of what is no dict")
        if not all(isinstance(key, (str, int)) for key in taken[::2]):  # hashing nested tuples can take for ever
            raise ValueError("a key that is neither a name nor a number")
        target.update(zip(taken[::2], taken[1::2], strict=True))


_PUSH = frozenset(
    {"BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"}
    | {"BINBYTES", "SHORT_BINBYTES", "UNICODE", "INT", "FLOAT"}
)
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY: dict[str, Callable[[], object]] = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}
_DAMAGE = (
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    UnicodeError,
    ValueError,
    struct.error,
    zipfile.BadZipFile,
)
"""What reading damaged bytes raises; found by flipping them."""


def _named(module: object, name: object) -> object:
    match module, name:
        case "torch", str(dtype) if dtype in _DTYPES:
            return _DTYPES[dtype]
        case ("torch" | "torch.storage", str(storage)) if storage in _STORAGES:
            return _Name("torch", storage)
        case (
            ("collections", "OrderedDict")
            | ("torch", "Size" | "device")
            | ("torch._utils", "_rebuild_tensor_v2" | "_rebuild_tensor_v3" | "_rebuild_parameter")
        ):
            return _Name(str(module), str(name))
    raise _UnsafeError(f"{module}.{name}")


def _called(function: object, arguments: object) -> object:
    match function, arguments:
        case _Name(name="OrderedDict"), ():
            return {}
        case _Name(name="Size"), (tuple() as sizes,):
            return sizes
        case _Name(name="device"), tuple():
            return "device"
        case _Name(name="_rebuild_parameter"), (ArchiveTensor() as tensor, *_):
            return tensor
        case _Name(name="_rebuild_tensor_v2"), (
            _Storage() as storage,
            int(offset),
            tuple() as shape,
            tuple() as strides,
            *_,
        ):
            return _tensor(storage, storage.dtype, offset, shape, strides)
        case (
            _Name(name="_rebuild_tensor_v3"),
            (_Storage() as storage, int(offset), tuple() as shape, tuple() as strides, _, _, str(dtype), *_),
        ):
            return _tensor(storage, dtype, offset, shape, strides)
    raise _UnsafeError(f"a call of {function if isinstance(function, _Name) else type(function).__name__}")


def _tensor(storage: _Storage, dtype: str, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> object:
    sizes = (*shape, *strides, offset)
    if len(shape) != len(strides) or not all(type(size) is int and size >= 0 for size in sizes):
        raise ValueError(f"a tensor of shape {shape} and strides {strides}")
    item = DTYPE_BITS[dtype] // 8
    start = storage.record.start + offset * item
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) if prod(shape) else -1
    if start + (last + 1) * item > storage.record.end:
        raise ValueError(f"a tensor of shape {shape} reaches beyond its storage")
    in_order, expected = True, 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        in_order &= size == 1 or stride == expected
        expected *= size
    info = TensorInfo(dtype, shape, start, start + prod(shape) * item) if in_order or not prod(shape) else None
    return ArchiveTensor(dtype, shape, info)
