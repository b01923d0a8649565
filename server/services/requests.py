"""What a client sends to have jobs stored."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, model_validator

from eagle3_core.contract.params import STAGES
from server.domain.policy import RetryPolicy
from server.domain.resources import BY_STAGE, Resources

MAX_DEPTH = 32


def _shallow(value: dict[str, Any]) -> dict[str, Any]:
    """No parameter is a tree; one that is would end whoever walks through it, one call a level."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        inner = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)]
        level = [one for several in inner for one in several]
        if not level:
            return value
    raise ValueError(f"is nested more than {MAX_DEPTH} deep")


Params = Annotated[dict[str, Any], AfterValidator(_shallow)]

_STAGES: list[JsonValue] = [*sorted(STAGES)]

NameText = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]+$")]
LabelKey = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_./-]{0,62}$")]
LabelValue = Annotated[str, Field(max_length=200, pattern=r"^[^\x00-\x1f\x7f]*$")]
Labels = dict[LabelKey, LabelValue]


class JobRequest(BaseModel):
    """One job: a stage and its parameters."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True)

    name: NameText | None = None
    stage: str = Field(description="what kind of work", json_schema_extra={"enum": [*_STAGES]})
    params: Params = Field(
        description="the parameters of the stage",
        json_schema_extra={"anyOf": [params.model_json_schema() for params in STAGES.values()]},
    )
    depends_on: list[NameText] = Field([], max_length=100, description="ids of jobs, or names of jobs of this chain")
    labels: Labels = Field({}, max_length=32, description="what its owner finds it by; at most 32")
    retry: RetryPolicy = Field(RetryPolicy(), description="which ends are followed by another attempt")
    max_seconds: float | None = Field(
        None, gt=0, le=31_536_000, description="seconds one attempt may take; over them it fails with time_limit"
    )
    priority: int = Field(0, ge=-1000, le=1000, description="the higher one starts first; the older one among equals")
    resources: Resources = Field(BY_STAGE, description="GPUs, CPUs and memory; default: what the stage needs")
    on_stall: Literal["report", "stop"] = Field(
        "report", description="stop: an attempt without progress for too long is ended, with the reason stalled"
    )

    @model_validator(mode="before")
    @classmethod
    def _no_pipeline(cls, value: object) -> object:
        if isinstance(value, dict) and "stages" in value and "stage" not in value:
            raise ValueError("what has `stages` is a pipeline: send it to POST /pipelines")
        return value


class ChainRequest(BaseModel):
    """Several jobs, stored together or not at all."""

    model_config = ConfigDict(extra="forbid", strict=True)

    jobs: list[JobRequest] = Field(min_length=1, max_length=100)


class StageDefaults(BaseModel):
    """What every stage of a pipeline gets unless it says otherwise."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True)

    params: Params = Field({}, description="each goes to the stages that know such a parameter")
    retry: RetryPolicy | None = None
    max_seconds: float | None = Field(None, gt=0, le=31_536_000)
    priority: int = Field(0, ge=-1000, le=1000)
    resources: Resources | None = None
    on_stall: Literal["report", "stop"] = "report"


class PipelineStage(BaseModel):
    """One job of a pipeline. A text in `params` may hold `${name.output_dir}`, which is also a dependency."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True)

    stage: str | None = Field(
        None, description="default: what it is called", json_schema_extra={"enum": [*_STAGES, None]}
    )
    params: Params = Field({}, description="the parameters of the stage")
    depends_on: list[NameText] = Field([], max_length=100, description="stages of this pipeline, or ids of jobs")
    labels: Labels = Field({}, max_length=32)
    retry: RetryPolicy | None = None
    max_seconds: float | None = Field(None, gt=0, le=31_536_000)
    priority: int | None = Field(None, ge=-1000, le=1000)
    resources: Resources | None = None
    on_stall: Literal["report", "stop"] | None = None


StageName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,62}$")]


class PipelineRequest(BaseModel):
    """A whole chain as one document, stored together or not at all."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True)

    name: NameText
    labels: Labels = Field({}, max_length=32, description="of every job")
    defaults: StageDefaults = StageDefaults()
    stages: dict[StageName, PipelineStage] = Field(min_length=1, max_length=100, description="by name, in order")
