"""Choosing where the channels of a model go, and what moves with them: tensors and statistics."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.calibration.statistics import Calibration, LayerStatistics, find_component
from quantkit.errors import NonFiniteError, RecipeError
from quantkit.models.channel_couplings import Coupling, find_couplings
from quantkit.models.layer_plan import dense_reason
from quantkit.models.layers import Layer, list_layers
from quantkit.models.source import Component
from quantkit.numerics.masks import MASKS, Pattern, parse_pattern
from quantkit.numerics.permutation_search import kept_share, search_permutation
from quantkit.numerics.threads import one_torch_thread
from quantkit.pipelines.running import quiet_libraries
from quantkit.progress import Progress, tracked
from quantkit.recipe.schema import Recipe, SparsityRecipe
from quantkit.sparsity.choose import LayerInputs, wanted_layers
from quantkit.sparsity.sparsegpt import read_rows
from quantkit.storage.digest import sha256_of
from quantkit.storage.jsonfile import read_json


@dataclass(frozen=True, eq=False)
class Permutation:
    """Where the channels between some layers go."""

    coupling: Coupling
    #: int64 (channels,): channel ``order[i]`` goes to place i
    order: Tensor
    #: share of the score's power that masks take, mean of the consumers that are to be sparse;
    #: of the channels that move
    lost_before: float
    lost_after: float


def choose_permutations(
    component: Component,
    recipe: Recipe,
    calibration: Calibration | None,
    *,
    device: torch.device,
    seed: int,
    progress: Progress,
) -> tuple[Permutation, ...]:
    """Return an order for the channels wherever the graph leaves them free.

    What is kept of the squared scores of the recipe's method grows, or nothing moves. One
    consumer's weight is in memory at a time, or two where they share their input channels.

    Args:
        component: the denoiser.
        recipe: says which layers are to be sparse, and how.
        calibration: input statistics, which wanda needs.
        device: where to search.
        seed: of the searches.
        progress: told of couplings done.

    Raises:
        RecipeError: a method that scores no weight alone, or misses its statistics.
        ArtefactError: a calibration of other weights.
        NonFiniteError: NaN or Inf in a weight.
    """
    rule = recipe.sparsity or SparsityRecipe()
    if rule.method not in MASKS:
        raise RecipeError(
            f"mask method {rule.method!r}: cannot guide a permutation, because its scores change "
            "while it prunes; permute with magnitude or wanda, then choose its masks for the "
            "permuted model",
            fields=("method",),
        )
    recipe = recipe.model_copy(update={"sparsity": rule})
    pattern = parse_pattern(rule.pattern)
    inputs = LayerInputs.of(component, calibration, None, update=False)
    useful = _useful_couplings(component, recipe, pattern, inputs)
    what = f"permutations of {component.name or component.class_name}"
    found = []
    for coupling, consumers in tracked(progress, what, useful):
        powers = [_power(layer, coupling, rule.method, inputs).to(device) for layer in consumers]
        with one_torch_thread():
            found.append(_search(coupling, powers, pattern, seed))
    return tuple(found)


def attention_heads(component: Component) -> dict[str, int]:
    """Return the number of heads of every attention module, by path.

    As diffusers builds it, without weights: configurations say it in a way of each class's own.
    """
    import diffusers

    config = read_json(component.path / "config.json")
    build: Any = getattr(diffusers, component.class_name).from_config
    with quiet_libraries(), torch.device("meta"):
        model: nn.Module = build(config)
    found = {name: getattr(module, "heads", None) for name, module in model.named_modules()}
    return {name: heads for name, heads in found.items() if isinstance(heads, int)}


def _useful_couplings(
    component: Component, recipe: Recipe, pattern: Pattern, inputs: LayerInputs
) -> list[tuple[Coupling, list[Layer]]]:
    """Return the couplings that can move, each with its consumers that are to be sparse."""
    layers = {layer.name: layer for layer in list_layers(component)}
    sparse = {
        layer.name
        for layer in wanted_layers(component, recipe)
        if dense_reason(layer, pattern) is None and not inputs.is_unseen(layer)
    }
    useful = []
    for coupling in find_couplings(component, layers, attention_heads(component)):
        consumers = [layer for layer in coupling.consumers if layer.name in sparse]
        if consumers and not coupling.block % pattern.m and not coupling.start % pattern.m:
            useful.append((coupling, consumers))
    return useful


def _power(layer: Layer, coupling: Coupling, method: str, inputs: LayerInputs) -> Tensor:
    """Return the squared scores of the columns that move, (N, channels), their sum 1."""
    moment = inputs.second_moment(layer, sha256_of(layer.shard, layer.weight))
    rows = read_rows(layer)
    if not bool(rows.isfinite().all()):
        raise NonFiniteError(
            f"{layer.shard}: {layer.weight.name}: NaN or Inf; repair or download the model"
        )
    power = MASKS[method](rows, moment).square()
    part = power[:, coupling.start : coupling.start + coupling.channels]
    total = part.sum(dtype=torch.float64)
    return (part / total).contiguous() if total else part.contiguous()


def _search(
    coupling: Coupling, powers: Sequence[Tensor], pattern: Pattern, seed: int
) -> Permutation:
    order = search_permutation(torch.cat(list(powers)), pattern, block=coupling.block, seed=seed)

    def lost(columns: Tensor) -> float:
        shares = [1 - kept_share(power[:, columns.to(power.device)], pattern) for power in powers]
        return sum(shares) / len(shares)

    return Permutation(coupling, order, lost(torch.arange(len(order))), lost(order))


#: Tensor name -> axis and int64 places: index i of the axis takes what was at ``places[i]``.
Moves = dict[str, tuple[int, Tensor]]


def moves_of(permutations: Sequence[Permutation]) -> Moves:
    """Return how tensors of the files move: rows of producers, columns of consumers."""
    moves: Moves = {}
    for permutation in permutations:
        coupling, order = permutation.coupling, permutation.order
        for layer in coupling.producers:
            copies = range(layer.n // coupling.channels)
            rows = torch.cat([order + copy * coupling.channels for copy in copies])
            for name in ("weight", "bias") if layer.bias else ("weight",):
                moves[f"{layer.name}.{name}"] = 0, rows
        stop = coupling.start + coupling.channels
        for layer in coupling.consumers:
            # Another coupling may move other columns of the same weight.
            name = f"{layer.name}.weight"
            _, columns = moves.setdefault(name, (1, torch.arange(layer.channels)))
            columns[coupling.start : stop] = coupling.start + order
    return moves


def permute_calibration(calibration: Calibration, moves: Moves, written: Component) -> Calibration:
    """Return the calibration that the permuted model would have given.

    Args:
        calibration: of the model as it was.
        moves: what moved in it.
        written: the permuted model, whose weights have other digests.

    Raises:
        ArtefactError: a calibration of other components.
    """
    name = find_component(written.name, tuple(calibration.layers), "calibration")
    table = {
        layer: _permute_statistics(statistics, moves.get(f"{layer}.weight"))
        for layer, statistics in calibration.layers[name].items()
    }
    digests = dict(calibration.metadata.digests[name])
    for layer in list_layers(written):
        if layer.weight.name in moves and layer.name in digests:
            digests[layer.name] = sha256_of(layer.shard, layer.weight)
    metadata = replace(
        calibration.metadata, digests={**calibration.metadata.digests, name: digests}
    )
    return replace(calibration, layers={**calibration.layers, name: table}, metadata=metadata)


#: What a calibration has for each input channel, the last axis; the rest knows no channels.
_BY_CHANNEL = ("second_moment", "channel_amax", "mean", "samples")


def _permute_statistics(
    statistics: LayerStatistics, move: tuple[int, Tensor] | None
) -> LayerStatistics:
    if move is None or move[0] == 0:
        return statistics
    moved: Mapping[str, Any] = {
        field: value[..., move[1]]
        for field in _BY_CHANNEL
        if (value := getattr(statistics, field)) is not None
    }
    return replace(statistics, **moved)
