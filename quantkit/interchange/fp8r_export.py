"""Black Forest Labs' fp8r: e4m3 codes with a scale for each row, which diffusers reads itself."""

from torch import Tensor

from quantkit.errors import ModelError
from quantkit.interchange.denoiser import Denoiser
from quantkit.interchange.layer_codes import LayerCodes
from quantkit.interchange.targets import Target
from quantkit.interchange.tensor_export import FilePlan
from quantkit.interchange.tensor_plan import plan_tensors, unchanged
from quantkit.numerics.formats import E4M3FN

FP8R = Target(
    "fp8r",
    formats=(E4M3FN,),
    inputs="inputs stay in 16 bit",
    cure="pack in e4m3fn with convolutions: false",
)


def plan_fp8r(source: Denoiser, *, requantize: bool) -> FilePlan:
    """Return the plan of the file, in diffusers' names: its converters would move rows.

    Raises:
        ModelError: diffusers reads no single file of the class.
        CheckpointError: a layer that fp8r does not hold.
    """
    _refuse_unread(source)
    entries = plan_tensors(source, unchanged(source.shapes), FP8R, requantize=requantize)
    return FilePlan(source, FP8R, entries, _lay_out, source.class_name)


def _refuse_unread(source: Denoiser) -> None:
    """Refuse a class that diffusers has no ``from_single_file`` of: nothing else reads fp8r."""
    import diffusers

    if not hasattr(getattr(diffusers, source.class_name, None), "from_single_file"):
        raise ModelError(
            f"{source.path}: {source.class_name}: no program reads it from fp8r, which only "
            "diffusers' from_single_file takes, and not of this class; export it to sdnq"
        )


def _lay_out(layer: str, codes: LayerCodes) -> dict[str, Tensor]:
    return {f"{layer}.weight": codes.codes, f"{layer}.weight_scale": codes.scale}
