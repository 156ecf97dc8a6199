"""The kinds of components that are packed besides denoisers: one literal row each."""

from collections.abc import Callable
from dataclasses import dataclass

from quantkit.models.family import Family
from quantkit.models.text_encoders import TEXT_ENCODERS, find_encoder, is_encoder
from quantkit.models.vaes import VAES, find_vae, is_vae
from quantkit.recipe.component_recipes import ComponentRecipe, EncoderRecipe, VaeRecipe


@dataclass(frozen=True)
class ComponentKind:
    """A kind of components that are packed where the recipe has a section on them."""

    section: type[ComponentRecipe]
    #: whose classes they are, as model_index.json has it
    library: str
    families: tuple[Family, ...]
    #: tells by a component's name and class
    is_one: Callable[[str, str], bool]
    #: gives the family of a class
    find_family: Callable[[str], Family]


ENCODERS = ComponentKind(EncoderRecipe, "transformers", TEXT_ENCODERS, is_encoder, find_encoder)
VAE = ComponentKind(VaeRecipe, "diffusers", VAES, is_vae, find_vae)
KINDS = (ENCODERS, VAE)


def kind_of(family: Family) -> ComponentKind | None:
    """Return the kind of a component of a family; None: a denoiser."""
    return next((kind for kind in KINDS if family in kind.families), None)
