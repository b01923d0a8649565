r"""What the end of a log says about a failure, by rules that are rows of data. Pure; standard library only.

    bytes -> lines (\n, \r; no colours) -> prefix after prefix taken off -> first rule that begins there -> Signature

A rule must match where a message begins: at the start of a line, or behind what launchers put in front ("[rank0]: ",
a time, "ERROR "). Talk about an error has words before it and matches nothing. Of several causes the first one counts,
for what follows is usually its echo; but a training step reported behind it shows that the program went on, and
what happened before that step was not the end.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from eagle3_core.contract.exits import Reason

END_BYTES = 65_536
"""How much of a log's end is worth reading: a few thousand lines."""

MAX_LINE = 2000
MAX_CAUSE = 300


@dataclass(frozen=True)
class Kind:
    """A kind of failure: a stable word finer than the reason, the job's reason, and what a user can do."""

    word: str
    reason: Reason
    hint: str


@dataclass(frozen=True)
class Rule:
    """One wording of a failure.

    Attributes:
        kind: what it tells of.
        pattern: how the message begins.
        example: a line it matches.
        source: where that wording was met.
        last: counts only as the last words of the log, because programs also survive it.
    """

    kind: Kind
    pattern: re.Pattern[str]
    example: str
    source: str
    last: bool = False


@dataclass(frozen=True)
class Signature:
    """A failure found: its kind, and the line as it stands in the log."""

    kind: Kind
    line: str


_GPU = Kind("gpu_memory", Reason.OUT_OF_GPU_MEMORY, "lower the batch or the length of the rows, or free the GPU")
_HOST = Kind(
    "host_memory",
    Reason.OUT_OF_HOST_MEMORY,
    "lower the batch, the length of the rows or the number of workers, or give the job more memory",
)
_SHM = Kind(
    "shared_memory",
    Reason.SHARED_MEMORY_EXHAUSTED,
    "enlarge /dev/shm (in a container: --shm-size or --ipc=host), or use fewer data loader workers",
)
_DISK = Kind("disk", Reason.DISK_FULL, "free space on that file system, then submit again")
_QUOTA = Kind("quota", Reason.DISK_FULL, "free space within the quota or write elsewhere, then submit again")
_STALE = Kind(
    "stale_file_handle", Reason.STORAGE_FAILED, "the file server took the file away: see its state, then submit again"
)
_IO = Kind("input_output", Reason.STORAGE_FAILED, "the disk or its server failed: see dmesg, then submit again")
_COLLECTIVE = Kind(
    "collective", Reason.COLLECTIVE_FAILED, "see which rank stopped first; the others only waited for it"
)
_HANGUP = Kind("hangup", Reason.KILLED_BY_SIGNAL, "SIGHUP is what a closing terminal sends; it did not come from Eyas")
_KILLED = Kind("loader_killed", Reason.KILLED_BY_SIGNAL, "the kernel's out-of-memory killer sends SIGKILL: see dmesg")
_MODULE = Kind("module", Reason.IMPORT_ERROR, "install it into the environment of the program")


def _rule(kind: Kind, pattern: str, example: str, source: str, *, last: bool = False) -> Rule:
    return Rule(kind, re.compile(pattern), example, source, last)


_ERROR = r"(?:\w+\.)*\w*Error: "
_LOADER = r"(?:RuntimeError: )?DataLoader worker \(pid(?:\(s\))? [\d, ]+\) is killed by signal: "

RULES: tuple[Rule, ...] = (
    # Shared memory before disk: the same errno, another remedy.
    _rule(
        _SHM,
        _LOADER + "Bus error",
        "RuntimeError: DataLoader worker (pid 77) is killed by signal: Bus error.",
        "pytorch/pytorch#5040",
    ),
    _rule(
        _SHM,
        "Unexpected bus error encountered in worker",
        "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).",
        "pytorch/pytorch#5040",
    ),
    _rule(
        _SHM,
        r"RuntimeError: unable to (?:write to|resize|open|allocate shared memory ?\(shm\) for) file <?/torch_\w+>?"
        r"(?:: No space| at |$)",
        "RuntimeError: unable to write to file </torch_8289_606636967_0>: No space left on device (28)",
        "idiap/ESLAM#20, MIC-DKFZ/nnUNet#294",
    ),
    _rule(
        _SHM,
        "NCCL WARN Error(?:: failed to extend| while creating shared memory segment) /dev/shm/.*No space left",
        "host:202016:202235 [0] misc/shmutils.cc:132 NCCL WARN Error while creating shared memory segment "
        "/dev/shm/nccl-WU88OE (size 9637888), error: No space left on device (28)",
        "pytorch/ci-infra#490",
    ),
    _rule(
        _SHM,
        "NCCL WARN Call to posix_fallocate failed ?: No space left on device",
        "[3] include/shm.h:28 NCCL WARN Call to posix_fallocate failed : No space left on device",
        "NVIDIA/nccl#525",
    ),
    _rule(
        _GPU,
        r"(?:torch\.(?:cuda\.)?)?OutOfMemoryError: ",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        "vllm-project/vllm#11560",
    ),
    _rule(
        _GPU,
        "RuntimeError: (?:CUDA|HIP|XPU|NPU|MPS backend) out of memory",
        "RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0)",
        "pytorch/pytorch#18853",
    ),
    _rule(
        _GPU,
        r"(?:RuntimeError|(?:torch\.)?AcceleratorError): (?:CUDA|HIP)(?: driver)? error: out of memory",
        "torch.AcceleratorError: CUDA error: out of memory",
        "deepbeepmeep/Wan2GP#1083",
    ),
    _rule(
        _GPU,
        r"RuntimeError: cuda runtime error \(2\) : out of memory",
        "RuntimeError: cuda runtime error (2) : out of memory at THCStorage.cu:65",
        "pytorch/pytorch#465",
    ),
    _rule(
        _GPU,
        _ERROR + r".{0,40}\bCU(?:BLAS|DNN|SOLVER)_STATUS_ALLOC_FAILED\b",
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "pytorch/pytorch#128601",
    ),
    _rule(
        _GPU,
        r"\w*[aA]llocator\w*: .{0,120}\bout of memory\b",
        "[W] allocator: memory mapping failed, out of memory",
        "deepmodeling/deepmd-kit#5418: the error that follows names no memory",
    ),
    _rule(
        _GPU,
        r"(?:\w+\.)*(?:XlaRuntimeError|RuntimeError): RESOURCE_EXHAUSTED: Out of memory",
        "jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8 bytes.",
        "google-deepmind/alphafold#1023",
    ),
    _rule(
        _HOST,
        r"(?:\w+\.)*_?(?:Array)?MemoryError(?:$|: )",
        "numpy.core._exceptions._ArrayMemoryError: Unable to allocate 3.00 GiB for an array",
        "numpy; tensorflow/tensorflow#45238",
    ),
    _rule(
        _HOST,
        r"RuntimeError: ?\[enforce fail at .{0,200}\] .{0,80}DefaultCPUAllocator: (?:can't allocate|not enough) memory",
        "RuntimeError: [enforce fail at alloc_cpu.cpp:73] . DefaultCPUAllocator: can't allocate memory: you tried to "
        "allocate 116813856768 bytes. Error code 12 (Cannot allocate memory)",
        "JingyunLiang/VRT#49",
    ),
    _rule(_HOST, r"OSError: \[Errno 12\] ", "OSError: [Errno 12] Cannot allocate memory", "errno.h"),
    _rule(
        _HOST,
        "terminate called after throwing an instance of 'std::bad_alloc'",
        "terminate called after throwing an instance of 'std::bad_alloc'",
        "libstdc++",
    ),
    _rule(
        _HOST,
        r"slurmstepd: error: Detected \d+ oom[-_]kill event",
        "slurmstepd: error: Detected 1 oom_kill event in StepId=113.0. Some of the step tasks have been OOM Killed.",
        "nextflow-io/nextflow#5932",
    ),
    _rule(
        _QUOTA,
        _ERROR + r".{0,160}(?:\[Errno 122\]|\(os error 122\)|Disk quota exceeded)",
        "OSError: [Errno 122] Disk quota exceeded",
        "errno.h",
    ),
    _rule(
        _DISK,
        _ERROR + r".{0,160}(?:\[Errno 28\]|\(os error 28\)|No space left on device)",
        "SafetensorError: Error while serializing: I/O error: No space left on device (os error 28)",
        "hiyouga/LlamaFactory#5155",
    ),
    _rule(
        _DISK,
        r"[\w./-]{1,80}: (?:write error|error writing [^:]+|cannot create [^:]+): No space left on device",
        "cp: error writing '/data/c/model.safetensors': No space left on device",
        "coreutils",
    ),
    _rule(
        _DISK,
        r"(?:sqlite3\.)?OperationalError: database or disk is full",
        "sqlite3.OperationalError: database or disk is full",
        "sqlite.org/rescode.html#full",
    ),
    _rule(
        _STALE,
        _ERROR + r".{0,160}(?:\[Errno 116\]|\(os error 116\)|Stale file handle)",
        "OSError: [Errno 116] Stale file handle: '/data/c/optimizer.pt'",
        "errno.h",
    ),
    _rule(
        _IO,
        _ERROR + r".{0,160}(?:\[Errno 5\]|\(os error 5\))",
        "OSError: [Errno 5] Input/output error: '/data/c/shard-3.safetensors'",
        "errno.h",
    ),
    _rule(
        _COLLECTIVE,
        r"Watchdog caught collective operation timeout: Work\w+\(",
        "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9, OpType=ALLREDUCE) ran for 600004 "
        "milliseconds",
        "hiyouga/LlamaFactory#8261",
    ),
    _rule(
        _COLLECTIVE,
        r"(?:torch\.distributed\.)?(?:RuntimeError|DistBackendError): (?:NCCL|RCCL|HCCL) error\b",
        "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1333, "
        "unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.18.1",
        "vllm-project/vllm#10523",
    ),
    _rule(
        _COLLECTIVE,
        r"RuntimeError: \[\S*gloo/\S+\] (?:Connection closed by peer|Timed out waiting)",
        "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:3277",
        "pytorch/gloo, transport/tcp/pair.cc",
    ),
    _rule(
        _HANGUP,
        r"Received (?:1|Signals\.SIGHUP) death signal, shutting down workers",
        "Received 1 death signal, shutting down workers",
        "open-mmlab/mmrotate#210",
    ),
    _rule(
        _HANGUP,
        r"(?:\w+\.)*SignalException: Process \d+ got signal: 1$",
        "torch.distributed.elastic.multiprocessing.api.SignalException: Process 4112 got signal: 1",
        "torch, distributed/elastic/multiprocessing/api.py",
    ),
    _rule(
        _KILLED,
        _LOADER + "Killed",
        "RuntimeError: DataLoader worker (pid 22048) is killed by signal: Killed.",
        "mittagessen/kraken#266",
    ),
    _rule(
        _MODULE,
        "(?:ModuleNotFoundError|ImportError): ",
        "ModuleNotFoundError: No module named 'flash_attn'",
        "Python",
        last=True,
    ),
)
"""Tried in this order at each place where a message may begin."""

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_CONTROLS = re.compile(r"[\x00-\x1f\x7f]")
_PREFIX = re.compile(
    r"\[?[Rr]ank ?\d{1,6}\]?:? ?"  # torchrun
    r"|[^|]{0,80}\d+%\|[^|]{0,200}\|[^\[]{0,60}\[[^\[\]]{1,200}\]"  # a progress bar that the message cut short
    r"|\[[^\[\]]{1,120}\]:? ?"  # [W], [E ProcessGroupNCCL.cpp:616], [PG ID 0 Rank 1], times
    r"|\([\w.-]{1,60} pid=\d+(?:, ip=[\d.]+)?\) "  # Ray, vLLM
    r"|\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d\S{0,16} "
    r"|\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)? "
    r"|[EWIF]\d{4} [\d:.]{8,20}\s+\d+ \S{1,120}:\d+\] "  # glog
    r"|(?:WARNING|ERROR|CRITICAL|FATAL):[\w.]{1,120}: ?"  # logging.basicConfig
    r"|(?:WARNING|Warning|ERROR|Error|error|CRITICAL|FATAL|fatal)[ :\]-]+"
    r"|[\w.-]{1,80}:\d+:\d+ "  # NCCL: host:pid:tid
    r"|[\w/]{1,80}\.(?:cc|h|cpp|cu):\d+\]? "
)
_MAX_PREFIXES = 8

_WENT_ON = re.compile(r"\b(?:step|iter|iteration|epoch)s?\b[^A-Za-z]{1,20}\S*.{0,60}\bloss\b", re.IGNORECASE)


def find_signature(log_end: bytes) -> Signature | None:
    """The first real cause at the end of a log, or None when it names none we know."""
    first: Signature | None = None
    parting: Signature | None = None
    for line in _lines(log_end):
        rule = _match(line)
        found = None if rule is None else Signature(rule.kind, line[:MAX_CAUSE])
        parting = found if rule is not None and rule.last else None
        if rule is None and _WENT_ON.search(line):
            first = None
        elif rule is not None and not rule.last:
            first = first or found
    return first or parting


def _lines(data: bytes) -> Iterator[str]:
    """Lines that say something, without colours; a carriage return ends one, as it does on a screen."""
    text = data[-END_BYTES:].decode("utf-8", "replace").replace("\r", "\n")
    for raw in text.split("\n"):
        line = _CONTROLS.sub(" ", _ESCAPES.sub("", raw[: MAX_LINE * 2]))[:MAX_LINE].rstrip()
        if line:
            yield line


def _match(line: str) -> Rule | None:
    """The rule for a message that begins at the start of the line, or behind one or more prefixes."""
    place = 0
    for _ in range(_MAX_PREFIXES):
        for rule in RULES:
            if rule.pattern.match(line, place):
                return rule
        prefix = _PREFIX.match(line, place)
        if prefix is None:
            return None
        place = prefix.end()
    return None
