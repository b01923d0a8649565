"""spec.json: what one job is asked to do, complete, with every default resolved when it was submitted."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, SerializeAsAny, ValidationInfo, field_validator

from eagle3_core.contract.params import STAGES, StageParams


class JobSpec(BaseModel):
    """The immutable order a stage works from."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = 1
    job_id: str
    name: str
    stage: str
    params: SerializeAsAny[StageParams]

    @field_validator("params", mode="before")
    @classmethod
    def _params_of_stage(cls, value: object, info: ValidationInfo) -> object:
        """Read `params` with the class of the stage named before it."""
        if isinstance(value, StageParams):
            return value
        return STAGES[info.data["stage"]].model_validate(value)

    @classmethod
    def read(cls, path: Path) -> "JobSpec":
        """The spec in a file.

        Raises:
            pydantic.ValidationError: a field is missing, unknown or out of bounds.
        """
        return cls.model_validate_json(path.read_bytes())
