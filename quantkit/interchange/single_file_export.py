"""A denoiser in 16 bit in one file of its authors' layout."""

from torch import Tensor

from quantkit.interchange.denoiser import Denoiser
from quantkit.interchange.layer_codes import LayerCodes
from quantkit.interchange.layout_names import layout_of_model, original_tensors
from quantkit.interchange.targets import Target
from quantkit.interchange.tensor_export import FilePlan
from quantkit.interchange.tensor_plan import plan_tensors

SINGLE_FILE = Target("a 16-bit file")


def plan_single_file(source: Denoiser) -> FilePlan:
    """Return the plan of the file.

    Raises:
        ModelError: of no known layout.
    """
    layout = layout_of_model(source.class_name, source.shapes)
    originals = original_tensors(layout, source.shapes)
    entries = plan_tensors(source, originals, SINGLE_FILE, requantize=False)
    return FilePlan(source, SINGLE_FILE, entries, _no_codes, layout.architecture, layout.prefix)


def _no_codes(layer: str, codes: LayerCodes) -> dict[str, Tensor]:
    raise AssertionError(f"{layer}: {codes.fmt.name} in a 16-bit file")
