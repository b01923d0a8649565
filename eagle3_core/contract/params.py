"""The parameters of each stage: request body, content of spec.json and argument of the core, one class each.

Every tunable is one field with its unit, bounds and description; CLI flags and docs come from here.
Paths are absolute. `InputPath` must exist when the job is submitted unless it lies in the `output_dir` of a job
this one depends on; `OutputPath` is made by the stage, must be empty or absent, and is marked with the job id; a
`WatchPath` is only looked at, and may appear later.
"""

import re
from pathlib import PurePosixPath
from typing import Annotated, ClassVar, Literal, Self, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Strict,
    WithJsonSchema,
    field_validator,
    model_validator,
)

Role = Literal["input", "output", "watch"]

LossName = Literal["forward_kl", "soft_ce", "reverse_kl", "jsd", "tv", "lk_alpha", "lk_hybrid"]
"""What a drafter can be trained for; defined in eagle3_core.training.losses."""


class PathRole:
    """Marks a field as a path the server checks against its roots."""

    def __init__(self, role: Role) -> None:
        self.role = role


InputPath = Annotated[str, PathRole("input"), Field(min_length=1, max_length=4096)]
OutputPath = Annotated[str, PathRole("output"), Field(min_length=1, max_length=4096)]
WatchPath = Annotated[str, PathRole("watch"), Field(min_length=1, max_length=4096)]
LayerIds = Annotated[tuple[int, ...], Strict(False), Field(min_length=1)]
Device = Annotated[
    str,
    Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="auto: the first GPU, else the CPU"),
]


class StageParams(BaseModel):
    """Base: immutable, and a field nobody knows is an error."""

    # Strict: true is no number and "5" is a text. A list may stand for a tuple, as JSON knows nothing else.
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=True)

    stage: ClassVar[str]

    @field_validator("*", mode="after")
    @classmethod
    def _no_nul_in_text(cls, value: object) -> object:
        if isinstance(value, str) and "\0" in value:
            raise ValueError("contains a NUL character")
        return value

    def paths(self) -> dict[str, tuple[Role, str]]:
        """Field name -> (role, path) of every path that is set."""
        found: dict[str, tuple[Role, str]] = {}
        for name, field in type(self).model_fields.items():
            value = dict(self)[name]
            role = next((m.role for m in field.metadata if isinstance(m, PathRole)), None)
            if role is None and isinstance(value, str):
                role = _optional_role(field.annotation)
            if role is not None and value is not None:
                found[name] = (role, value)
        return found


def _optional_role(annotation: object) -> Role | None:
    """The role inside `InputPath | None`, whose mark pydantic leaves on the member."""
    marks = (mark for member in get_args(annotation) for mark in get_args(member)[1:])
    return next((mark.role for mark in marks if isinstance(mark, PathRole)), None)


class VerifierParams(StageParams):
    """Base of the stages that load a verifier, or its tokenizer, by transformers."""

    allow_remote_code: bool = Field(
        False, description="run Python code that lies in the verifier's directory; the daemon must allow it as well"
    )


class PrepareParams(VerifierParams):
    """Conversations -> token ids, loss mask, token counts and a draft vocabulary."""

    stage: ClassVar[str] = "prepare"

    verifier: InputPath = Field(description="verifier directory; its tokenizer and chat template are used")
    conversations: InputPath = Field(
        description="file of conversations: JSONL, one row a line, as it is, .gz or .zst; or .parquet. A row holds "
        "`messages`, ShareGPT `conversations`, or `input_ids` and `loss_mask`"
    )
    output_dir: OutputPath | None = Field(None, description="default: the job's own artifacts directory")
    draft_vocab_size: int = Field(32_000, ge=1, description="tokens the drafter can propose")
    max_seq_len: int = Field(2048, ge=8, description="tokens; longer rows are cut at the end")
    max_bad_rows: int = Field(
        0, ge=0, description="lines that are no row (not JSON, cut, not UTF-8, ...) to leave out before the job fails"
    )


class ExtractParams(VerifierParams):
    """Prepared rows -> a store of aux and last hidden states of the verifier."""

    stage: ClassVar[str] = "extract"

    verifier: InputPath = Field(description="verifier directory in Hugging Face format")
    prepared_dir: InputPath = Field(description="output directory of a prepare job")
    output_dir: OutputPath | None = Field(None, description="default: the job's own artifacts directory")
    aux_layer_ids: LayerIds | None = Field(
        None, description="id k is the state entering layer k; default [2, N//2, N-3]"
    )
    batch_tokens: int = Field(4096, ge=1, description="tokens per forward pass, padding included")
    shard_mb: int = Field(256, ge=1, description="MB per shard file, about")
    device: Device = "auto"
    device_map: Literal["auto", "balanced", "balanced_low_0", "sequential"] | None = Field(
        None,
        description="spread the verifier over all GPUs of the job (`gpus`), as accelerate does; default: one device",
    )
    dtype: Literal["float32", "bfloat16"] = Field("bfloat16", description="of the verifier's forward pass")
    store_dtype: Literal["float32", "bfloat16", "float8_e4m3"] = Field(
        "bfloat16", description="of the stored states; float8_e4m3 takes half the room of bfloat16"
    )
    verify_rows: int = Field(
        4,
        ge=0,
        description="rows whose states are computed once more, each row alone and without capturing, and compared",
    )


class TrainParams(StageParams):
    """Hidden states -> an EAGLE-3 drafter, one judged checkpoint an epoch."""

    stage: ClassVar[str] = "train"

    verifier: InputPath = Field(description="verifier directory; embedding, head and final norm are read from it")
    data_dir: InputPath = Field(description="hidden-state store: output directory of an extract job")
    vocab_map_dir: InputPath | None = Field(
        None, description="directory with vocab_map.safetensors; default: the map of `finetune_from`"
    )
    output_dir: OutputPath | None = Field(None, description="checkpoints 0/, 1/, ...; default: the job's artifacts")
    draft_vocab_size: int | None = Field(None, ge=1, description="tokens; must agree with the vocabulary map")

    finetune_from: InputPath | None = Field(None, description="drafter checkpoint to start from")
    drafter_config: InputPath | None = Field(
        None,
        description="config.json of a drafter in any format, whose shape a fresh one takes where the fields below "
        "leave it open",
    )
    allow_source_mismatch: bool = Field(
        False,
        description="train although this request or the store contradicts `finetune_from`; recorded in the checkpoint",
    )
    aux_layer_ids: LayerIds | None = Field(None, description="default: the store's")
    norm_before_residual: bool | None = Field(None, description="default: the source's, else false")
    norm_before_fc: bool | None = Field(None, description="default: the source's, else false")
    fc_norm: bool | None = Field(None, description="default: the source's, else false")
    norm_output: bool | None = Field(None, description="default: the source's, else false")
    qk_norm: bool | None = Field(
        None, description="norms of queries and keys, as Qwen3; default: the source's, else false"
    )
    mla: bool | None = Field(
        None,
        description="multi-head latent attention, in the sizes of drafter_config, else of the verifier; default: the "
        "source's, else false",
    )
    sliding_window: int | None = Field(None, ge=1, description="rows a row sees; default: the source's, else all")
    num_hidden_layers: int | None = Field(None, ge=1, le=64, description="layers; default: the source's, else 1")
    intermediate_size: int | None = Field(None, ge=1, description="default: the source's, else the verifier's")
    num_attention_heads: int | None = Field(None, ge=1, description="default: the source's, else the verifier's")
    num_key_value_heads: int | None = Field(None, ge=1, description="default: the source's, else the verifier's")
    head_dim: int | None = Field(None, ge=2, description="default: the source's, else the verifier's")

    epochs: int = Field(5, ge=1, le=10_000)
    lr: float = Field(1e-4, gt=0, description="peak learning rate")
    weight_decay: float = Field(0.01, ge=0)
    scheduler: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_ratio: float = Field(0.01, ge=0, le=1, description="share of all steps")
    grad_clip: float = Field(1.0, gt=0, description="maximum norm of the gradient")
    max_seq_len: int = Field(2048, ge=8, description="tokens; longer rows are cut at the end")
    batch_tokens: int | None = Field(
        None,
        ge=1,
        description="rows are packed up to so many tokens, a longer one stands alone; 1: one row a pack; "
        "default: max_seq_len",
    )
    accumulate_packs: int = Field(1, ge=1, le=10_000, description="packs whose gradients make one optimizer step")
    ttt_steps: int = Field(3, ge=1, le=16, description="unroll depth of training-time test")
    ttt_step_loss_decay: float = Field(1.0, gt=0, le=1, description="step k weighs decay**k")
    ttt_step_weights: tuple[Annotated[float, Field(ge=0)], ...] | None = Field(
        None, min_length=1, description="weight of each TTT step, in place of the decay"
    )
    loss: dict[LossName, Annotated[float, Field(gt=0)]] = Field(
        {"forward_kl": 1.0},
        min_length=1,
        description="loss -> weight; a sum of forward_kl, soft_ce, reverse_kl, jsd, tv, lk_alpha, lk_hybrid",
    )
    outside_vocab: Literal["keep", "skip"] = Field(
        "keep",
        description="rows for which the verifier's first choice is outside the draft vocabulary: keep scores them on "
        "what it says of the tokens inside, and counts them once on the validation rows; skip leaves them out and "
        "counts them in every epoch, at the cost of the verifier's whole head",
    )
    noise: float = Field(0.05, ge=0, description="half width of the uniform noise on hidden states")
    val_ratio: float = Field(0.1, ge=0, lt=1, description="share of prompts held out for validation")
    train_head: bool = Field(True, description="false keeps lm_head at the verifier's rows")
    train_embedding: bool = Field(
        False,
        description="train a copy of the verifier's embedding; vLLM serves a drafter with its own, SGLang puts the "
        "verifier's in its place",
    )
    num_workers: int = Field(0, ge=0, le=64, description="processes that read hidden states ahead")
    seed: int = Field(0, ge=-(1 << 63), lt=1 << 63)
    device: Device = "auto"
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="bfloat16: autocast over float32 weights")
    speculative_tokens: int = Field(3, ge=1, le=64, description="draft tokens a round, written for servers")
    save_steps: int | None = Field(None, ge=1, description="also save within an epoch, every so many steps")
    keep_last: int | None = Field(
        None,
        ge=1,
        description="epoch checkpoints to keep: the newest sound ones, besides that with the lowest validation loss; "
        "default: all",
    )
    keep_every: int | None = Field(
        None, ge=1, description="with keep_last: those of every so many epochs are kept as well"
    )
    on_invalid_checkpoint: Literal["stop", "warn"] = "stop"

    @model_validator(mode="after")
    def _a_vocabulary_from_somewhere(self) -> Self:
        if self.vocab_map_dir is None and self.finetune_from is None:
            raise ValueError("vocab_map_dir is needed unless finetune_from brings a vocabulary map of its own")
        if self.finetune_from is not None and self.drafter_config is not None:
            raise ValueError("drafter_config describes a fresh drafter, finetune_from brings its own config: give one")
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("norm_before_fc and fc_norm exclude each other")
        if self.ttt_step_weights is not None:
            if len(self.ttt_step_weights) != self.ttt_steps:
                raise ValueError(
                    f"ttt_step_weights has {len(self.ttt_step_weights)} entries for {self.ttt_steps} ttt_steps"
                )
            if not any(self.ttt_step_weights):
                raise ValueError("ttt_step_weights are all zero: nothing would be learned")
        if self.keep_every is not None and self.keep_last is None:
            raise ValueError("keep_every says what is kept besides keep_last; without keep_last every checkpoint is")
        return self

    def step_weights(self) -> tuple[float, ...]:
        """What each TTT step's mean loss counts."""
        return self.ttt_step_weights or tuple(self.ttt_step_loss_decay**k for k in range(self.ttt_steps))


class ValidateParams(StageParams):
    """A verdict on one checkpoint."""

    stage: ClassVar[str] = "validate"

    checkpoint: InputPath = Field(description="checkpoint directory")
    level: Literal["quick", "full", "deep"] = Field(
        "full",
        description="quick: headers, names, shapes, config; full: every byte; deep: a forward pass and a resumed step",
    )
    previous: InputPath | None = Field(None, description="checkpoint of the epoch before, which must differ")
    verifier: InputPath | None = Field(
        None, description="verifier directory, to compare sizes, embedding and head with; needed at level deep"
    )
    data_dir: InputPath | None = Field(None, description="hidden-state store, for level deep")
    max_mb_per_s: float | None = Field(None, gt=0, description="read no faster than that, in 10^6 bytes a second")
    output_dir: OutputPath | None = Field(None, description="default: the job's own artifacts directory")

    @model_validator(mode="after")
    def _what_a_level_needs(self) -> Self:
        if self.level == "deep" and (self.verifier is None or self.data_dir is None):
            raise ValueError("level deep needs verifier and data_dir")
        if self.level != "deep" and self.data_dir is not None:
            raise ValueError("data_dir is for level deep")
        if self.level == "quick" and (self.previous is not None or self.max_mb_per_s is not None):
            raise ValueError("level quick reads no tensor: previous and max_mb_per_s are for the other levels")
        return self


ServedFormat = Literal["speculators", "vllm", "sglang", "eagle", "both"]
"""What a drafter can be converted to; see eagle3_core.checkpoint.convert."""


class ConvertParams(StageParams):
    """A checkpoint of any format as one that a server reads, judged; written to `<output_dir>/<to>`."""

    stage: ClassVar[str] = "convert"

    checkpoint: InputPath = Field(description="checkpoint directory; of an output directory the latest epoch is taken")
    to: ServedFormat = Field(
        description="speculators; vllm: HF style; sglang; eagle: the official module; both: one for vLLM and SGLang"
    )
    verifier: InputPath | None = Field(
        None,
        description="verifier directory: lends embedding and head where the checkpoint has none, says what SGLang's "
        "layer ids mean, and is compared with",
    )
    verifier_name: str | None = Field(
        None,
        min_length=1,
        max_length=4096,
        description="path or hub id of the verifier that servers are told; default: what the checkpoint says, else "
        "the path of `verifier`",
    )
    aux_layer_ids: LayerIds | None = Field(
        None,
        description="states the drafter was trained on, where the checkpoint does not say it or may mean two things",
    )
    max_mb_per_s: float | None = Field(None, gt=0, description="read no faster than that, in 10^6 bytes a second")
    output_dir: OutputPath | None = Field(None, description="default: the job's own artifacts directory")


class EvaluateParams(VerifierParams):
    """Acceptance length of a drafter, by walk over hidden states and by real speculative decoding."""

    stage: ClassVar[str] = "evaluate"

    checkpoint: InputPath = Field(description="checkpoint directory")
    verifier: InputPath = Field(description="verifier directory in Hugging Face format")
    prompts: InputPath = Field(
        description="JSONL file of held-out conversations; each is cut before its last assistant turn"
    )
    output_dir: OutputPath | None = Field(None, description="default: the job's own artifacts directory")
    max_prompts: int = Field(16, ge=1, description="prompts, from the top of the file")
    max_new_tokens: int = Field(64, ge=2, description="tokens per prompt")
    speculative_tokens: int = Field(3, ge=1, le=16, description="draft tokens a round")
    device: Device = "auto"
    min_acceptance_length: float | None = Field(None, ge=1, description="fail with gate_not_met below this")


PROGRESS_FORMATS = ("auto", "none", "speculators", "specforge", "hf_trainer", "tqdm", "plain")
PROGRESS_GROUPS = frozenset(
    {"epoch", "epoch0", "epochs", "step", "steps", "epoch_step", "epoch_steps"}
    | {"loss", "lr", "accuracy", "tokens_per_s", "eta_s"}
)
MAX_PATTERN = 1000


def _progress(value: object) -> object:
    """A format's name, or {"regex": pattern} with at least one named group that means something."""
    if isinstance(value, str):
        if value not in PROGRESS_FORMATS:
            raise ValueError(f'{value!r} is not a format: {", ".join(PROGRESS_FORMATS)}, or {{"regex": pattern}}')
        return value
    if not isinstance(value, dict) or set(value) != {"regex"} or not isinstance(value["regex"], str):
        raise ValueError('is neither the name of a format nor {"regex": pattern}')
    if len(value["regex"]) > MAX_PATTERN:
        raise ValueError(f"the regular expression is longer than {MAX_PATTERN} characters")
    try:
        groups = set(re.compile(value["regex"]).groupindex)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"not a regular expression: {error}") from None
    if not groups or groups - PROGRESS_GROUPS:
        wrong = ", ".join(sorted(groups - PROGRESS_GROUPS)) or "none"
        raise ValueError(f"named groups are {', '.join(sorted(PROGRESS_GROUPS))}; found besides: {wrong}")
    return value


Progress = Annotated[
    str | dict[str, str],
    BeforeValidator(_progress),
    WithJsonSchema(
        {
            "anyOf": [
                {"enum": list(PROGRESS_FORMATS)},
                {"type": "object", "properties": {"regex": {"type": "string"}}, "required": ["regex"]},
            ]
        }
    ),
]
"""How a foreign program's output is read."""


class WatchedParams(StageParams):
    """What is common to programs that are not ours: how their output is read and their checkpoints are judged."""

    progress: Progress = Field(
        "auto", description='how progress is read from the output: a format, or {"regex": pattern} with named groups'
    )
    total_steps: int | None = Field(None, ge=1, lt=1 << 53, description="steps of the run, where the output names none")
    expect_drafter: bool = Field(
        False, description="a checkpoint that is no EAGLE-3 drafter is invalid; else its weights alone are judged"
    )
    verifier: InputPath | None = Field(None, description="verifier directory, to compare checkpoints with")


class ExternalParams(WatchedParams):
    """A program the daemon's operator allows, run as it is; never through a shell."""

    stage: ClassVar[str] = "external"

    argv: Annotated[tuple[Annotated[str, Field(max_length=65_536)], ...], Strict(False)] = Field(
        min_length=1,
        max_length=1000,
        description="program (absolute path, named in EYAS_EXTERNAL_PROGRAMS) and its arguments",
    )
    output_dir: OutputPath | None = Field(
        None, description="the program finds it in EYAS_OUTPUT_DIR; default: the job's own artifacts directory"
    )
    working_dir: InputPath | None = Field(None, description="directory it is started in; default: the output directory")
    expect_outputs: Annotated[tuple[str, ...], Strict(False)] = Field(
        (), max_length=1000, description="paths in the output directory that must be there when it ends"
    )
    watch: WatchPath | None = Field(
        None, description="directory whose checkpoints are judged, or a path in the output directory, the default"
    )
    on_invalid_checkpoint: Literal["warn", "stop"] = "warn"
    on_nonfinite_loss: Literal["report", "stop"] = "report"

    @field_validator("argv")
    @classmethod
    def _a_program_by_its_full_path(cls, argv: tuple[str, ...]) -> tuple[str, ...]:
        if not PurePosixPath(argv[0]).is_absolute():
            raise ValueError(f"{argv[0]!r} is not an absolute path; programs are not looked up")
        if any("\0" in word for word in argv):
            raise ValueError("contains a NUL character")
        return argv

    @field_validator("watch")
    @classmethod
    def _no_way_up(cls, path: str | None) -> str | None:
        if path is not None and not PurePosixPath(path).is_absolute() and ".." in PurePosixPath(path).parts:
            raise ValueError(f"{path!r} is not a path inside the output directory")
        return path

    @field_validator("expect_outputs")
    @classmethod
    def _paths_that_stay_inside(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            path = PurePosixPath(name)
            if not path.parts or path.is_absolute() or ".." in path.parts or "\0" in name:
                raise ValueError(f"{name!r} is not a path inside the output directory")
        return names


class AdoptParams(WatchedParams):
    """A process somebody else started: watched to its end, never signalled."""

    stage: ClassVar[str] = "adopt"

    pid: int = Field(ge=1, lt=1 << 31, description="process to watch")
    log: InputPath | None = Field(None, description="file its output goes to; default: the file its stdout is")
    watch: WatchPath | None = Field(None, description="directory whose checkpoints are judged")
    start_ticks: int | None = Field(
        None,
        ge=0,
        lt=1 << 63,
        description="its start in clock ticks since boot; default: as found at submit",
    )
    boot_id: str | None = Field(None, max_length=64, description="boot it runs in; default: as found at submit")

    @field_validator("watch")
    @classmethod
    def _absolute_watch(cls, path: str | None) -> str | None:
        if path is not None and not PurePosixPath(path).is_absolute():
            raise ValueError(f"{path!r} is not an absolute path")
        return path


STAGES: dict[str, type[StageParams]] = {
    params.stage: params
    for params in (
        PrepareParams,
        ExtractParams,
        TrainParams,
        ValidateParams,
        ConvertParams,
        EvaluateParams,
        ExternalParams,
        AdoptParams,
    )
}
"""Every kind of work, by name."""
