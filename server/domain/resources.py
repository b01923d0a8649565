"""What a job asks of the host, and whether this host can ever give it.

request --resolve (with the host's GPUs)--> Resources with a number of GPUs --queue--> leased GPUs, by UUID
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict, model_validator

GIB = 1 << 30


def _text(value: object) -> object:
    """An index may come as a number."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


GpuName = Annotated[
    str,
    BeforeValidator(_text, json_schema_input_type=str | int),
    Field(pattern=r"^(\d{1,4}(:\d{1,2})?|(GPU|MIG)-[0-9A-Za-z/-]{1,120})$"),
]
"""A GPU by UUID or by NVML's index: "3", of a MIG instance "3:0"."""


class Resources(BaseModel):
    """What a job needs of the host besides time. Once resolved, `gpus` is a number and `gpu_ids` are UUIDs."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=True)

    gpus: int | None = Field(
        None,
        ge=0,
        le=1024,
        description="GPUs; default: 1 for a stage that computes on one and for `external`, where the host has any",
    )
    gpu_ids: Annotated[tuple[GpuName, ...], Strict(False)] = Field(
        (), max_length=1024, description="these GPUs, by UUID or index"
    )
    gpu_memory_gib: float | None = Field(None, gt=0, description="GiB that must be free on each GPU at the start")
    cpus: int | None = Field(None, ge=1, description="CPUs; also the number of threads of the stage")
    ram_gib: float | None = Field(None, gt=0, description="GiB of the host's memory")

    @model_validator(mode="after")
    def _one_number_of_gpus(self) -> Self:
        if len(set(self.gpu_ids)) < len(self.gpu_ids):
            raise ValueError("gpu_ids names a GPU twice")
        if self.gpu_ids and self.gpus not in (None, len(self.gpu_ids)):
            raise ValueError(f"gpus is {self.gpus}, but gpu_ids names {len(self.gpu_ids)}; one of them is enough")
        return self


BY_STAGE = Resources()
"""Nothing in particular: what the stage needs."""


class GpuRef(BaseModel):
    """A GPU as it was handed out. Its index may change, its UUID does not."""

    model_config = ConfigDict(frozen=True)

    index: str = Field(description="NVML's index when it was handed out; of a MIG instance as 3:0")
    uuid: str
    name: str | None


@dataclass(frozen=True)
class Gpu:
    """A GPU, or MIG instance, that jobs may be given.

    Attributes:
        memory_total, memory_free: bytes; None where the GPU does not tell.
        blocked: why it is not handed out although no job of ours holds it, to follow "is"; None when nothing is
            in the way.
    """

    index: str
    uuid: str
    name: str | None = None
    memory_total: int | None = None
    memory_free: int | None = None
    blocked: str | None = None

    @property
    def ref(self) -> GpuRef:
        """What is stored of it."""
        return GpuRef(index=self.index, uuid=self.uuid, name=self.name)


class CannotBeMet(Exception):
    """This host, as it is, can never give that. `field` is one of Resources, or `device`."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field
        self.message = message


def check_device(asked: Resources, device: object) -> None:
    """Compare a request, as it came, with the stage's `device`.

    Raises:
        CannotBeMet: they contradict each other.
    """
    count = len(asked.gpu_ids) or asked.gpus
    if count == 0 and asked.gpu_memory_gib is not None:
        raise CannotBeMet("gpu_memory_gib", "memory of a GPU is asked for, but gpus is 0")
    if not isinstance(device, str) or count is None:
        return
    field = "gpu_ids" if asked.gpu_ids else "gpus"
    if device == "cpu" and count > 0:
        raise CannotBeMet(field, "a GPU is asked for, but the parameters say device cpu")
    if device.startswith("cuda") and count == 0:
        raise CannotBeMet(field, f"the parameters say device {device}, which needs a GPU")
    number = device.removeprefix("cuda:")
    if number.isdigit() and int(number) >= count:
        text = f"device {device} counts, from 0, among the GPUs the job is given, and these are {count}"
        raise CannotBeMet(field, text)


def resolve(asked: Resources, stage: str, params: Mapping[str, Any], gpus: Sequence[Gpu]) -> Resources:
    """The request with its number of GPUs, and their ids as UUIDs.

    Args:
        asked: what the job asks for, or was resolved to before.
        stage: its kind of work.
        params: of the stage; `device` says whether it computes on a GPU.
        gpus: all that jobs of this host may be given.

    Raises:
        CannotBeMet: the host can never give it.
    """
    device, named, field = params.get("device"), asked.gpu_ids, "gpu_ids"
    if asked.gpus is None and not named and gpus and isinstance(device, str) and device.startswith("cuda:"):
        named, field = (device.removeprefix("cuda:"),), "device"
    if named:
        uuids = tuple(_uuid_of(word, gpus, field) for word in named)
        if len(set(uuids)) < len(uuids):
            raise CannotBeMet("gpu_ids", "names a GPU twice, by index and by UUID")
        wanted = asked.model_copy(update={"gpus": len(uuids), "gpu_ids": uuids})
    else:
        wanted = asked.model_copy(update={"gpus": _count(asked, stage, device, bool(gpus))})
    _check_gpus(wanted, gpus)
    return wanted


def _count(asked: Resources, stage: str, device: object, any_gpu: bool) -> int:
    if asked.gpus is not None:
        return asked.gpus
    if asked.gpu_memory_gib is not None:
        return 1
    return 1 if any_gpu and computes_on_gpu(stage, device) else 0


def computes_on_gpu(stage: str, device: object) -> bool:
    """Whether a job that does not say so gets a GPU where there is one; nobody knows what a program needs."""
    return stage == "external" or device not in (None, "cpu")


def _uuid_of(word: str, gpus: Sequence[Gpu], field: str) -> str:
    for gpu in gpus:
        if word in (gpu.index, gpu.uuid):
            return gpu.uuid
    known = ", ".join(f"{gpu.index} ({gpu.uuid})" for gpu in gpus) or "none"
    raise CannotBeMet(field, f"there is no GPU {word} that jobs may be given; there are: {known}")


def _check_gpus(wanted: Resources, gpus: Sequence[Gpu]) -> None:
    assert wanted.gpus is not None
    if wanted.gpus > len(gpus):
        have = f"this host has {len(gpus)} that jobs may be given" if gpus else "this host has none"
        raise CannotBeMet("gpus", f"{_gpus_are(wanted.gpus)} asked for; {have}")
    fit = [gpu for gpu in gpus if may_serve(gpu, wanted)]
    if len(fit) >= wanted.gpus:
        return
    if wanted.gpu_memory_gib is not None:
        sizes = ", ".join(f"GPU {gpu.index}: {gib(gpu.memory_total)}" for gpu in gpus)
        text = f"{_gpus_are(wanted.gpus)} asked for with {wanted.gpu_memory_gib:g} GiB; this host has {sizes}"
        raise CannotBeMet("gpu_memory_gib", text)
    text = f"{wanted.gpus} GPUs are asked for, but a process can use no more than one MIG instance"
    raise CannotBeMet("gpu_ids" if wanted.gpu_ids else "gpus", text)


def may_serve(gpu: Gpu, wanted: Resources) -> bool:
    """Whether a GPU is one of those named, large enough when it is empty, and usable beside others."""
    if wanted.gpu_ids and gpu.uuid not in wanted.gpu_ids:
        return False
    if wanted.gpus is not None and wanted.gpus > 1 and gpu.uuid.startswith("MIG-"):
        return False
    if wanted.gpu_memory_gib is None:
        return True
    return gpu.memory_total is not None and gpu.memory_total >= wanted.gpu_memory_gib * GIB


def check_host(wanted: Resources, cpus: int, ram_bytes: int) -> None:
    """Compare CPUs and memory with what the host has.

    Raises:
        CannotBeMet: it has less.
    """
    if wanted.cpus is not None and wanted.cpus > cpus:
        raise CannotBeMet("cpus", f"{wanted.cpus} CPUs are asked for; this host has {cpus}")
    if wanted.ram_gib is not None and wanted.ram_gib * GIB > ram_bytes:
        raise CannotBeMet("ram_gib", f"{wanted.ram_gib:g} GiB are asked for; this host has {gib(ram_bytes)}")


def environment_of(wanted: Resources, gpus: Sequence[GpuRef], hide: bool) -> dict[str, str]:
    """The variables that make a process use what it was given.

    Args:
        wanted: what the job asked for.
        gpus: what it was given; by UUID, so that the numbering of the driver and of CUDA cannot differ.
        hide: whether a job without a GPU is to see none.
    """
    found: dict[str, str] = {}
    if gpus:
        found |= {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(gpu.uuid for gpu in gpus)}
    elif hide:
        found["CUDA_VISIBLE_DEVICES"] = ""
    if wanted.cpus is not None:
        found["OMP_NUM_THREADS"] = str(wanted.cpus)
    return found


def _gpus_are(count: int) -> str:
    return "1 GPU is" if count == 1 else f"{count} GPUs are"


def gib(size: int | None) -> str:
    """`38.2 GiB`."""
    return "unknown size" if size is None else f"{size / GIB:.1f} GiB"
