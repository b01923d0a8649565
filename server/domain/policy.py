"""What a job asks for besides its work: how often it is tried, how long it may take, what a stall means.

attempt ended --reason in `retry.on`, retries left--> another attempt, `backoff_s` later
              --stopped for a pause--> another attempt, once it is resumed
              --else--> the job's end
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, Strict, field_validator

from eagle3_core.contract.exits import Reason

_NO_END_OF_AN_ATTEMPT = frozenset({Reason.CANCELLED_BY_USER, Reason.DEPENDENCY_FAILED})


class RetryPolicy(BaseModel):
    """Which ends of an attempt are followed by another one. A training goes on from its latest sound checkpoint."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=True)

    max_retries: int = Field(
        2, ge=0, le=20, description="further attempts after the first; those after a pause are free"
    )
    backoff_s: float = Field(10.0, ge=0, le=86_400, description="seconds between an end and the next attempt")
    on: Annotated[tuple[Annotated[Reason, Strict(False)], ...], Strict(False)] = Field(
        (Reason.WORKER_LOST, Reason.HOST_REBOOTED, Reason.PREEMPTED), description="reasons that are tried again"
    )

    @field_validator("on")
    @classmethod
    def _reasons_an_attempt_can_end_for(cls, on: tuple[Reason, ...]) -> tuple[Reason, ...]:
        for reason in on:
            if reason in _NO_END_OF_AN_ATTEMPT:
                raise ValueError(f"{reason} is for good; it cannot be tried again")
        return tuple(dict.fromkeys(on))

    def grants(self, reason: str | None, retries: int) -> bool:
        """Whether an attempt that ended for `reason`, after `retries` earlier ones, is followed by another."""
        return reason in self.on and retries < self.max_retries


class Policy(BaseModel):
    """Stored with the job as it was when the job was submitted."""

    model_config = ConfigDict(frozen=True)

    retry: RetryPolicy = RetryPolicy()
    max_seconds: float | None = None
    on_stall: Literal["report", "stop"] = "report"


NO_RETRY = Policy(retry=RetryPolicy(max_retries=0))
