"""The calibration section of recipes."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from quantkit.errors import RecipeError
from quantkit.recipe.fields import Strict
from quantkit.storage.limits import MAX_COUNT, MAX_SEED, MAX_STEPS


class CalibrationRecipe(Strict):
    """Settings of the calibration run."""

    prompts: Annotated[int, Field(ge=1, le=MAX_COUNT)] = 16
    steps: Annotated[int, Field(ge=1, le=MAX_STEPS)] = 20
    #: None: the pipeline's own default
    guidance: float | None = None
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] = 0
    #: timestep buckets with statistics of their own
    buckets: Annotated[int, Field(ge=1)] = 4
    #: prompts per run of the pipeline
    batch: Annotated[int, Field(ge=1, le=MAX_COUNT)] = 4
    #: weight of a step in second moments: the same for all, or its effect on the final sample
    weighting: Literal["uniform", "schedule"] = "uniform"
    #: of the rows of each call that second moments look at, drawn at random: neighbours in a
    #: picture are alike, so a quarter of the rows of four times the prompts says more
    row_share: Annotated[float, Field(gt=0, le=1)] = 1.0

    @model_validator(mode="after")
    def _a_step_in_every_bucket(self) -> "CalibrationRecipe":
        if "buckets" in self.model_fields_set and self.buckets > self.steps:
            raise RecipeError(
                f"buckets {self.buckets}: more than the {self.steps} steps; take fewer buckets"
            )
        return self
