"""What a request would become, and what can be told before anything starts. Nothing is stored."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, Field

from eagle3_core.contract.params import (
    EvaluateParams,
    ExtractParams,
    PrepareParams,
    StageParams,
    TrainParams,
)
from eagle3_core.contract.prepared_files import load_manifest
from eagle3_core.contract.store_files import StoreIndex, read_index
from eagle3_core.contract.verifier_files import VerifierFiles
from server.db.queries import listing
from server.domain.estimate import Estimate, evaluate_memory, extract_memory, train_memory
from server.domain.job import Job
from server.domain.policy import RetryPolicy
from server.domain.resources import Resources, gib
from server.domain.space import checkpoint_bytes
from server.services.conflicts import Doubt, is_too_large, row_lengths
from server.services.drafts import Draft, Placed, draft_all, needs_of
from server.services.models import count_numbers, read_verifier
from server.services.paths import resolve
from server.services.preview import Preview, preview_of
from server.services.runtime import Runtime
from server.services.sizes import drafter_of, need_of
from server.system import disk

_PACE_DEPENDS_ON = ("verifier", "device", "dtype")
EARLIER_JOBS = 20
"""How many earlier jobs of a stage are looked at for a pace."""

T = TypeVar("T")

_UNREADABLE = (ValueError, OSError, KeyError, IndexError)
"""What reading inputs that are not there, or not what they should be, ends with; said where it is refused."""


class PathCheck(BaseModel):
    """A path of the parameters."""

    field: str
    role: Literal["input", "output", "watch"]
    path: str
    state: str = Field(description="exists; made by another job of the request; empty; may appear later")


class SpaceCheck(BaseModel):
    """What the job will write, and what is free where it writes."""

    bytes: int | None = Field(description="at most, about; null where it is not known")
    basis: str
    directory: str
    free_bytes: int | None


class MemoryCheck(BaseModel):
    """GPU memory at the most."""

    bytes: int | None
    basis: str = Field(description="the arithmetic, or why it is not known")
    largest_gpu_bytes: int | None = Field(description="memory of the largest GPU that jobs may be given")


class TimeCheck(BaseModel):
    """How long it will take."""

    seconds: float | None
    basis: str = Field(description="the arithmetic and the job its pace is from, or why it is not known")


class DryWarning(BaseModel):
    """Something that is worth a word."""

    pointer: str
    code: str
    message: str


class Preflight(BaseModel):
    """What can be told of a job before it starts, from headers and sizes."""

    paths: list[PathCheck]
    verifier: dict[str, Any] | None = Field(description="sizes of the verifier it names")
    data: dict[str, Any] | None = Field(description="rows, tokens, layers ... it reads; null until they are there")
    drafter: dict[str, Any] | None = Field(description="sizes of the drafter it will train")
    space: SpaceCheck
    gpu_memory: MemoryCheck
    time: TimeCheck
    preview: Preview | None = Field(description="of prepare: its first rows, and what of them is trained on")
    warnings: list[DryWarning]


class DryJob(BaseModel):
    """A job as it would be stored, with every default filled in."""

    name: str
    stage: str
    params: dict[str, Any]
    output_dir: str | None = Field(description="null: its own directory, which is not there before it is submitted")
    depends_on: list[str] = Field(description="names within the request, ids of other jobs")
    labels: dict[str, str]
    priority: int
    resources: Resources
    retry: RetryPolicy
    max_seconds: float | None
    on_stall: str
    preflight: Preflight


class DryRun(BaseModel):
    """The jobs of a request; it would be accepted."""

    dry_run: Literal[True] = True
    jobs: list[DryJob]


def dry_run(runtime: Runtime, placed: Sequence[Placed]) -> DryRun:
    """The jobs a request would become.

    Raises:
        ServiceError: it would be refused, for the same reasons.
    """
    drafts = draft_all(runtime, placed)
    return DryRun(jobs=[_job(runtime, draft, drafts) for draft in drafts])


def _job(runtime: Runtime, draft: Draft, drafts: Sequence[Draft]) -> DryJob:
    names = {other.id: other.name for other in drafts}
    own = draft.output_dir == runtime.job_dir(draft.id).artifacts
    return DryJob(
        name=draft.name,
        stage=draft.stage,
        params=draft.params.model_dump(mode="json"),
        output_dir=None if own else str(draft.output_dir),
        depends_on=[names.get(needed, needed) for needed in draft.depends_on],
        labels=draft.request.labels,
        priority=draft.request.priority,
        resources=draft.resources,
        retry=draft.request.retry,
        max_seconds=draft.request.max_seconds,
        on_stall=draft.request.on_stall,
        preflight=_Look(runtime, draft, needs_of(draft, drafts)).preflight(),
    )


class _Look:
    """One look at everything a job names."""

    def __init__(self, runtime: Runtime, draft: Draft, needs: Sequence[Draft]) -> None:
        self._runtime, self._draft, self._needs = runtime, draft, needs
        self._params = _with_planned_vocabulary(draft.params, {other.output_dir: other for other in needs})
        self._doubts: list[Doubt] = list(draft.doubts)
        self._files = self._verifier()
        self._numbers = 0 if self._files is None else _numbers(self._files.path)
        self._index = _or_none(lambda: _index_of(self._params))
        self._lengths = _or_none(lambda: _row_lengths(self._params, self._index))

    def preflight(self) -> Preflight:
        """All of it."""
        memory = self._memory()
        return Preflight(
            paths=self._paths(),
            verifier=None if self._files is None else _shown_verifier(self._files, self._numbers),
            data=_or_none(lambda: _shown_data(self._params, self._index)),
            drafter=self._drafter(),
            space=self._space(),
            gpu_memory=memory,
            time=self._time(),
            preview=preview_of(self._draft.params, self._runtime.settings.worker_python),
            warnings=[DryWarning(**vars(doubt)) for doubt in self._doubts],
        )

    def _doubt(self, name: str, code: str, message: str) -> None:
        self._doubts.append(Doubt(f"{self._draft.pointer}/params/{name}", code, message))

    def _verifier(self) -> VerifierFiles | None:
        path = self._params.paths().get("verifier")
        files = None if path is None else _or_none(lambda: read_verifier(Path(path[1])))
        for code, message in () if files is None else files.warnings:
            self._doubt("verifier", code, message)
        return files

    def _paths(self) -> list[PathCheck]:
        return [
            PathCheck(field=name, role=role, path=path, state=self._state(role, path))
            for name, (role, path) in self._draft.params.paths().items()
        ]

    def _state(self, role: str, path: str) -> str:
        if Path(path).exists():
            return "empty" if role == "output" else "exists"
        if role == "output":
            return "made by this job"
        maker = next((one.name for one in self._needs if resolve(path).is_relative_to(one.output_dir)), None)
        if maker is not None:
            return f"made by {maker}"
        return "may appear later" if role == "watch" else "made by a job it waits for"

    def _drafter(self) -> dict[str, Any] | None:
        params, files = self._params, self._files
        if not isinstance(params, TrainParams) or files is None:
            return None
        found = _or_none(lambda: drafter_of(params, files))
        if found is None:
            return None
        config, size = found
        head = size.draft_vocab_size * size.hidden_size
        embedding = size.vocab_size * size.hidden_size
        trained = size.body + (head if params.train_head else 0) + (embedding if params.train_embedding else 0)
        return {
            "parameters": size.body + head + embedding,
            "trained": trained,
            "draft_vocab_size": size.draft_vocab_size,
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "num_attention_heads": config.num_attention_heads,
            "num_key_value_heads": config.num_key_value_heads,
            "head_dim": config.head_dim,
            "num_aux_states": config.num_aux_states,
            "checkpoint_bytes": checkpoint_bytes(size, params),
        }

    def _space(self) -> SpaceCheck:
        need = need_of(self._params)
        free = _or_none(lambda: disk.free_bytes(self._draft.output_dir)[1])
        directory = str(self._draft.output_dir)
        return SpaceCheck(bytes=need.bytes, basis=need.basis, directory=directory, free_bytes=free)

    def _memory(self) -> MemoryCheck:
        estimate = _or_none(self._estimated_memory)
        sizes = [gpu.memory_total for gpu in self._runtime.hardware.gpus({}) if gpu.memory_total is not None]
        largest = max(sizes, default=None)
        if estimate is None:
            basis = "not known: the stage uses no GPU, or what it depends on is not there"
            return MemoryCheck(bytes=None, basis=basis, largest_gpu_bytes=largest)
        needed, basis = estimate.bytes, estimate.basis
        if self._draft.resources.gpus == 0:
            basis += "; it runs on the CPU, where this is main memory"
        elif largest is not None and needed > largest * (gpus := self._gpus_shared()):
            has = f"the largest GPU has {gib(largest)}" + (f", of which it would take {gpus}" if gpus > 1 else "")
            text = f"needs {basis}; that is {gib(needed)}, and {has}"
            self._doubts.append(Doubt(f"{self._draft.pointer}/params", "gpu_too_small", text))
        return MemoryCheck(bytes=needed, basis=basis, largest_gpu_bytes=largest)

    def _gpus_shared(self) -> int:
        """Over how many GPUs the memory is spread."""
        params = self._params
        spread = isinstance(params, ExtractParams) and params.device_map is not None
        return (self._draft.resources.gpus or 1) if spread else 1

    def _estimated_memory(self) -> Estimate | None:
        files = self._files
        if files is None:
            return None
        match self._params:
            case TrainParams() as params:
                config, size = drafter_of(params, files)
                stored = files.embedding.info.end - files.embedding.info.start
                return train_memory(params, config, size, stored, max(self._lengths) if self._lengths else None)
            case ExtractParams() as params:
                aux = len(params.aux_layer_ids or (0, 0, 0))
                return extract_memory(params, self._numbers, files.hidden_size, aux)
            case EvaluateParams() as params:
                return evaluate_memory(self._numbers, _numbers(Path(params.checkpoint)))
        return None

    def _time(self) -> TimeCheck:
        if not isinstance(self._params, ExtractParams | TrainParams):
            return TimeCheck(
                seconds=None, basis=f"not known: jobs of the stage {self._draft.stage} tell no tokens per second"
            )
        if self._lengths is None:
            return TimeCheck(seconds=None, basis="not known before its data is there")
        tokens, words = _work(self._params, self._lengths)
        earlier = self._earlier()
        if earlier is None:
            text = f"no earlier {self._draft.stage} job with this verifier, device and dtype has succeeded on this host"
            return TimeCheck(seconds=None, basis=f"not known: {text}; it would be {words}")
        rate = earlier.status.tokens_per_s
        assert rate
        text = f"{words} at {rate:.0f} tokens/s, the last pace of job {earlier.id}"
        basis = f"{text}; loading, validating and saving come on top"
        return TimeCheck(seconds=round(tokens / rate, 1), basis=basis)

    def _earlier(self) -> Job | None:
        """The newest job that did the same with the same verifier, and told its pace."""
        asked = self._params.model_dump()
        with self._runtime.database.read() as session:
            found = listing.last_ended(session, self._draft.stage, EARLIER_JOBS)
        told = (job for job in found if job.status.tokens_per_s)
        same = (job for job in told if all(job.params.get(name) == asked[name] for name in _PACE_DEPENDS_ON))
        return next(same, None)


def _work(params: ExtractParams | TrainParams, lengths: Sequence[int]) -> tuple[float, str]:
    """Tokens a job goes through, and how that comes about."""
    if isinstance(params, ExtractParams):
        return sum(lengths), f"{sum(lengths):,} tokens"
    tokens = sum(min(length, params.max_seq_len) for length in lengths)
    share = 1 - params.val_ratio
    return tokens * share * params.epochs, f"{tokens:,} tokens x {share:g} to train on x {params.epochs} epochs"


def _index_of(params: StageParams) -> StoreIndex | None:
    """Of the store a training reads, where that is there and not too large."""
    if not isinstance(params, TrainParams) or is_too_large(Path(params.data_dir)):
        return None
    return read_index(Path(params.data_dir))


def _row_lengths(params: StageParams, index: StoreIndex | None) -> list[int] | None:
    if index is not None:
        return [row.length for shard in index.shards for row in shard.rows]
    return row_lengths(Path(params.prepared_dir)) if isinstance(params, ExtractParams) else None


def _with_planned_vocabulary(params: StageParams, makers: Mapping[Path, Draft]) -> StageParams:
    """A training whose vocabulary map is not there yet, with the size the job that makes it was asked for."""
    if not isinstance(params, TrainParams) or params.vocab_map_dir is None or Path(params.vocab_map_dir).exists():
        return params
    made = next(
        (one.params for path, one in makers.items() if resolve(params.vocab_map_dir).is_relative_to(path)), None
    )
    if not isinstance(made, PrepareParams):
        return params
    return params.model_copy(update={"draft_vocab_size": made.draft_vocab_size})


def _numbers(path: Path) -> int:
    """How many numbers a model directory holds; 0 where it cannot be read."""
    return _or_none(lambda: count_numbers(path)) or 0


def _shown_verifier(files: VerifierFiles, numbers: int) -> dict[str, Any]:
    names = (
        "model_type",
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
        "tied",
    )
    shown = {name: vars(files)[name] for name in names}
    return {"path": str(files.path), "architectures": list(files.architectures), "numbers": numbers, **shown}


def _shown_data(params: StageParams, index: StoreIndex | None) -> dict[str, Any] | None:
    """What is there of the data a job reads."""
    match params:
        case PrepareParams():
            return {"bytes": Path(params.conversations).stat().st_size}
        case ExtractParams():
            lengths = row_lengths(Path(params.prepared_dir))
            manifest = load_manifest(Path(params.prepared_dir))
            return {
                "rows": len(lengths),
                "tokens": sum(lengths),
                "longest_row": max(lengths, default=0),
                "max_seq_len": manifest.max_seq_len,
                "draft_vocab_size": manifest.draft_vocab_size,
                "vocab_coverage": manifest.vocab_coverage,
            }
        case TrainParams() if index is not None:
            lengths = [row.length for shard in index.shards for row in shard.rows]
            return {
                "rows": len(lengths),
                "tokens": sum(lengths),
                "longest_row": max(lengths),
                "layer_ids": list(index.meta.layer_ids),
                "hidden_size": index.meta.hidden_size,
                "vocab_size": index.meta.vocab_size,
                "last_state": index.meta.last_state,
                "dtype": index.meta.dtype,
                "verifier": index.meta.verifier,
                "shards": len(index.shards),
                "bytes": sum(shard.bytes for shard in index.shards),
            }
    return None


def _or_none(read: Callable[[], T]) -> T | None:
    try:
        return read()
    except _UNREADABLE:
        return None
