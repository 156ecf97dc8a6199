"""The noise floor: distances between pictures of the original and of its own variants.

Two runs of the original with the same prompts and seeds: computed in another 16-bit dtype, and with
another number of prompts at a time, which changes nothing but the order of sums. A packed pipeline
that moves the pictures no further cannot be told from them.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from quantkit.eval.measuring.backbones import Backbones
from quantkit.eval.measuring.comparison import Comparison, compare
from quantkit.eval.measuring.equivalence import (
    Equivalence,
    compare_with_zero,
    correct_holm,
    show_equivalence,
)
from quantkit.eval.measuring.generation import Generated, GenerationSettings, generate
from quantkit.eval.measuring.pictures import Pairs
from quantkit.eval.measuring.sample_statistics import Summary, subtract_pairs, summarize
from quantkit.eval.measuring.step_errors import Divergence, StepErrors, Trajectory
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from quantkit.errors import NonFiniteError
from quantkit.models.source import Model
from quantkit.pipelines.running import load_pipeline
from quantkit.progress import Progress

#: What the original is computed in for the floor, by what it is computed in otherwise. A CPU's
#: float32 is held against BF16: the coarser of the two, so its floor is the wider one.
OTHER_DTYPE = {
    torch.float32: torch.bfloat16,
    torch.float16: torch.bfloat16,
    torch.bfloat16: torch.float16,
}
#: Of a comparison whose gates are not known.
NO_MARGINS: Mapping[str, float] = MappingProxyType({})
_INFINITE = "pairs with identical pictures (infinite)"
DTYPE_NAMES = {torch.float32: "float32", torch.float16: "FP16", torch.bfloat16: "BF16"}


@dataclass(frozen=True)
class Original:
    """The original's run that everything is compared with."""

    model: Model
    settings: GenerationSettings
    device: torch.device
    dtype: torch.dtype
    generated: Generated
    trajectory: Trajectory


@dataclass(frozen=True)
class Floor:
    """The original against itself."""

    #: "dtype" or "batch"
    name: str
    #: in words, as "BF16 instead of float32"
    title: str
    #: None when it could not be measured; the note says why
    comparison: Comparison | None
    divergence: StepErrors | None
    note: str = ""


@dataclass(frozen=True)
class GapTest:
    """Tests of packed against floor in one metric, paired by prompt."""

    #: of the two-sided t-test that they differ, corrected by Holm over all metrics and floors
    p_differs: float
    #: None: the metric has no gate, whose distance from identical pictures is the margin
    equivalence: Equivalence | None


@dataclass(frozen=True)
class FloorGap:
    """A packed pipeline against one floor, prompt by prompt."""

    floor: Floor
    #: packed - floor by metric; "clip" is the difference of the two CLIP scores
    differences: dict[str, Summary]
    #: what the same pairs show, by metric; none for one prompt
    tests: dict[str, "GapTest"]


def measure_floors(
    pipe: Any, original: Original, backbones: Backbones, progress: Progress
) -> tuple[Floor, ...]:
    """Run the original twice more, and compare.

    Args:
        pipe: the original as it was run.
        original: what came of that.
        backbones: the networks of LPIPS and CLIP score.
        progress: told about every step.
    """
    base, other = original.dtype, OTHER_DTYPE[original.dtype]
    count, batch = len(original.settings.prompts), original.settings.batch
    split = other_batch(count, batch)
    title = f"batches of {split or 2} instead of {min(batch, count)}"
    if split is None:
        batched = Floor("batch", title, None, None, "one prompt cannot be split into batches")
    else:
        settings = replace(original.settings, batch=split)
        batched = _measure(
            Floor("batch", title, None, None), pipe, replace(original, settings=settings),
            backbones, progress,
        )  # fmt: skip
    title = f"{DTYPE_NAMES[other]} instead of {DTYPE_NAMES[base]}"
    with wide_products(original.device):
        recast = load_pipeline(original.model, original.device, other)
        cast = _measure(Floor("dtype", title, None, None), recast, original, backbones, progress)
    return cast, batched


def other_batch(count: int, batch: int) -> int | None:
    """Return another number of prompts at a time, or None when there is but one prompt."""
    if count == 1:
        return None
    batch = min(batch, count)
    return batch // 2 if batch > 1 else 2


def measure_gaps(
    packed: Comparison, floors: tuple[Floor, ...], margins: Mapping[str, float] = NO_MARGINS
) -> tuple[FloorGap, ...]:
    """Return what the packed pipeline adds to each floor, paired by prompt.

    Args:
        packed: its pictures against the original's.
        floors: of the original.
        margins: by metric, within which a difference is called equivalent.
    """
    values = [_differences(packed, floor.comparison) for floor in floors]
    tests = _test_gaps(values, margins)
    return tuple(
        FloorGap(floor, {name: summarize(pairs, infinite_note=_INFINITE)
                         for name, pairs in found.items()}, tested)
        for floor, found, tested in zip(floors, values, tests, strict=True)
    )  # fmt: skip


def compared_floors(floors: Iterable[Floor]) -> tuple[Comparison, ...]:
    """Return the comparisons of those floors that could be measured."""
    return tuple(floor.comparison for floor in floors if floor.comparison is not None)


@contextmanager
def wide_products(device: torch.device) -> Iterator[None]:
    """Sum 16-bit products in float32 and round once, on a CPU: what matrix units do.

    A CPU without 16-bit instructions would take seven times as long for the same result: 5 steps of
    12 prompts of the demo took 112 s of CPU time in BF16, and 15 s in float32.
    """
    if device.type != "cpu":
        yield
        return
    with _WideProducts():
        yield


class _WideProducts(TorchFunctionMode):
    _FUNCTIONS = frozenset({
        functional.linear, functional.conv2d, functional.scaled_dot_product_attention,
        torch.bmm, torch.baddbmm, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__,
    })  # fmt: skip

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        # diffusers' dispatch gives attention's tensors by name.
        first = next(iter((*args, *kwargs.values())), None)
        dtype = first.dtype if func in self._FUNCTIONS and first is not None else None
        if dtype not in (torch.float16, torch.bfloat16):
            return func(*args, **kwargs)

        def widen(value: Any) -> Any:
            return value.float() if isinstance(value, Tensor) and value.dtype == dtype else value

        return func(*pytree.tree_map(widen, args), **pytree.tree_map(widen, kwargs)).to(dtype)


def _measure(
    floor: Floor, pipe: Any, original: Original, backbones: Backbones, progress: Progress
) -> Floor:
    divergence = Divergence(original.trajectory)
    label = f"noise floor: {floor.title}"
    try:
        run = generate(
            pipe, original.settings, label=label, progress=progress, listener=divergence.listen,
            replay=True,
        )  # fmt: skip
    except NonFiniteError as error:
        # The packed pipeline is not to blame, and the other floor stands: say so and go on.
        return replace(floor, note=f"the original overflows: {str(error).partition(';')[0]}")
    prompts = original.settings.prompts
    pairs = Pairs(picture_names(len(prompts)), original.generated.pictures, run.pictures, prompts)
    return replace(floor, comparison=compare(pairs, backbones), divergence=divergence.errors())


def picture_names(count: int) -> tuple[str, ...]:
    """Return the names of a report's pictures, in the order of the prompts."""
    return tuple(f"{index:03d}" for index in range(count))


def _differences(packed: Comparison, floor: Comparison | None) -> dict[str, list[float]]:
    """Return packed - floor by metric, one per prompt; infinite where either is."""
    if floor is None:
        return {}
    found = {
        name: subtract_pairs(score.values, floor.scores[name].values)
        for name, score in packed.scores.items()
    }
    if packed.clip is not None and floor.clip is not None:
        found["clip"] = subtract_pairs(packed.clip.packed.values, floor.clip.packed.values)
    return found


def _test_gaps(
    values: Sequence[Mapping[str, Sequence[float]]], margins: Mapping[str, float]
) -> tuple[dict[str, GapTest], ...]:
    """Return the tests of every floor's metrics, corrected together."""
    tested = [
        (index, name, test)
        for index, found in enumerate(values)
        for name, pairs in found.items()
        if (test := compare_with_zero(pairs)) is not None
    ]
    p_values = correct_holm([min(1.0, 2.0 * min(t.above, t.below)) for _, _, t in tested])
    found: tuple[dict[str, GapTest], ...] = tuple({} for _ in values)
    for (index, name, _), p in zip(tested, p_values, strict=True):
        margin = margins.get(name)
        equal = None if margin is None else show_equivalence(values[index][name], margin)
        found[index][name] = GapTest(p, equal)
    return found
