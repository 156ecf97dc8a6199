"""One call of a block with the rows of student and teacher, to be asked again for the student's."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from quantkit.recovery.denoiser_calls import SHARED

#: Rows that a block answers at a time where no gradient is taken.
_ROWS = 32


class BlockCall:
    """What a block was asked by the student, and what its teacher answered to its own question."""

    def __init__(
        self, block: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any,
        rows: int,
    ) -> None:  # fmt: skip
        """Take the call apart.

        Args:
            block: the module; its pairs say whose layers compute.
            args: as it was called; leaves of 2B rows have the student's first.
            kwargs: likewise.
            output: what it answered, a tensor or a nest of them.
            rows: B.
        """
        self.rows = rows
        self._block = block
        self._shared = {name: value for name, value in kwargs.items() if name in SHARED}
        own = {name: value for name, value in kwargs.items() if name not in SHARED}
        self._leaves, self._spec = pytree.tree_flatten((tuple(args), own))
        self._split = [self._has_rows(leaf) for leaf in self._leaves]
        self._output, self._output_spec = pytree.tree_flatten(output)
        self._places = [i for i, leaf in enumerate(self._output) if self._has_rows(leaf)]
        #: (B, ...) each, what the teacher answered
        self.target = tuple(self._output[i][rows:] for i in self._places)

    def _has_rows(self, leaf: object) -> bool:
        return isinstance(leaf, Tensor) and leaf.ndim > 0 and len(leaf) == 2 * self.rows

    def ask(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Return what the student's block answers to some of its rows, all pairs alone."""
        leaves = [
            leaf[: self.rows][rows] if split else leaf
            for leaf, split in zip(self._leaves, self._split, strict=True)
        ]
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        # Not the block itself, whose hooks would answer.
        leaves = pytree.tree_leaves(self._block.forward(*args, **kwargs, **self._shared))
        return tuple(leaves[i] for i in self._places)

    def loss(self, rows: Tensor) -> Tensor:
        """Return the mean squared error of the student's answers to some rows."""
        squares = [
            (answer - target[rows]).float().square()
            for answer, target in zip(self.ask(rows), self.target, strict=True)
        ]
        total = torch.stack([s.sum() for s in squares]).sum()
        return total.div(sum(s.numel() for s in squares))

    @torch.no_grad()
    def judge(self, count: int) -> float:
        """Return the loss over the first rows, ``count`` or all."""
        count = min(count, self.rows)
        losses = [float(self.loss(part)) * len(part) for part in self._parts(count)]
        return sum(losses) / count

    def power(self, count: int) -> float:
        """Return the mean square of the teacher's answers over the first rows."""
        parts = [target[:count].float().square() for target in self.target]
        total = torch.stack([p.sum() for p in parts]).sum()
        return float(total / sum(p.numel() for p in parts))

    @torch.no_grad()
    def output(self) -> Any:
        """Return the output with the student's rows as they are answered now."""
        parts = [self.ask(part) for part in self._parts(self.rows)]
        leaves = list(self._output)
        for place, answers, target in zip(
            self._places, zip(*parts, strict=True), self.target, strict=True
        ):
            leaves[place] = torch.cat([*answers, target])
        return pytree.tree_unflatten(leaves, self._output_spec)

    def _parts(self, count: int) -> list[Tensor]:
        return list(
            torch.arange(count, device=self.target[0].device).tensor_split(-(-count // _ROWS))
        )
