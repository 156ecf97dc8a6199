"""Goals of a recipe: the budget for choosing treatments, and the gates of the verdict."""

from typing import Annotated

from pydantic import Field, model_validator

from quantkit.errors import RecipeError
from quantkit.recipe.fields import Patterns, Strict


class BudgetRecipe(Strict):
    """The budget of 'quantkit calibrate optimize': one of bytes, error, speed and ssim."""

    #: largest packed size, as a share of the source's size
    bytes: Annotated[float, Field(gt=0)] | None = None
    #: largest predicted NMSE of the final latents
    error: Annotated[float, Field(gt=0)] | None = None
    #: least modelled speed-up of the layers that can be packed
    speed: Annotated[float, Field(ge=1)] | None = None
    #: least mean SSIM of pictures that are really made
    ssim: Annotated[float, Field(gt=0, le=1)] | None = None
    #: globs on the names of the treatments that may be chosen, besides 16-bit
    treatments: Annotated[Patterns, Field(min_length=1)] = ("*",)

    @property
    def goals(self) -> tuple[str, ...]:
        """The goals that are set, by name."""
        return tuple(name for name in GOALS if getattr(self, name) is not None)

    @model_validator(mode="after")
    def _one_goal(self) -> "BudgetRecipe":
        if len(self.goals) > 1:
            raise RecipeError(f"budget: found {' and '.join(self.goals)}; set one of them")
        return self


#: What a budget can be set on.
GOALS = ("bytes", "error", "speed", "ssim")


class Gates(Strict):
    """Quality gates of the packed pipeline; None leaves the default of 'quantkit eval report'."""

    ssim: Annotated[float, Field(ge=-1, le=1)] | None = None
    lpips: Annotated[float, Field(ge=0)] | None = None
    #: largest relative loss of the CLIP score, in percent
    clip_loss: float | None = None
    #: most pictures that may be broken, in percent
    broken: Annotated[float, Field(ge=0, le=100)] | None = None
    #: most pictures that may be changed beyond the noise floor's own, in percent; None: not judged
    changed: Annotated[float, Field(ge=0, le=100)] | None = None
