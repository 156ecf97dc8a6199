"""The pass of a reconstruction: student and teacher side by side, block after block."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor, nn

from quantkit.errors import ModelError, NonFiniteError
from quantkit.recovery.distill.batches import Calls
from quantkit.recovery.distill.joint_forward import LayerPair, alone, paired_layers
from quantkit.recovery.reconstruct.block_call import BlockCall
from quantkit.recovery.reconstruct.block_file import ReconstructedBlock
from quantkit.recovery.reconstruct.block_finetuning import Student, Tuning, refine
from quantkit.recovery.reconstruct.blocks import Block, find_blocks
from quantkit.recovery.reconstruct.layer_fit import Examples, Fit, Fitting, Throughput, fit_layer
from quantkit.recovery.reconstruct.time_budget import TimeBudget

#: Rows that a block's candidates are compared on.
_JUDGED = 64


@dataclass(eq=False)
class _Open:
    """A block that the pass is in."""

    block: Block
    #: what its layers were when the pass came to it
    start: dict[str, tuple[Tensor, ...]]
    began: float
    #: seconds that it may take; None: no limit
    seconds: float | None
    fits: dict[str, Fit]


class Pass:
    """Reconstructs the blocks of a student."""

    def __init__(
        self,
        denoiser: nn.Module,
        students: Mapping[str, Student],
        fitting: Fitting,
        tuning: Tuning,
        seed: int,
    ) -> None:
        """Prepare the pass.

        Args:
            denoiser: the teacher, float32.
            students: the masked layers by module path; changed.
            fitting: how exactly layers are fitted.
            tuning: how blocks are refined.
            seed: of the drawing of examples.
        """
        self._denoiser = denoiser
        self._students = students
        self._fitting = fitting
        self._tuning = tuning
        self._throughput = Throughput(fitting)
        self._blocks = find_blocks(denoiser, students)
        self._home = {layer: block for block in self._blocks for layer in block.layers}
        places = {layer: i for i, layer in enumerate(students)}
        # Generators of their own: what a part draws does not depend on those before it.
        self._seeds = {layer: seed * 1_000_003 + place for layer, place in places.items()}
        self._open: dict[str, _Open] = {}
        self._report: Callable[[ReconstructedBlock], None] = _ignore
        self._time_budget: TimeBudget | None = None
        #: the blocks done, by module path
        self.rebuilt: dict[str, ReconstructedBlock] = {}

    @property
    def total(self) -> int:
        """How many blocks there are."""
        return len(self._blocks)

    @property
    def size(self) -> int:
        """How many parameters are not done yet."""
        return sum(self._size(b) for b in self._blocks if b.name not in self.rebuilt)

    def loss(self, calls: Calls) -> float:
        """Return the mean squared error of the student's answers."""
        with torch.no_grad(), paired_layers(self._denoiser, self._layers(), calls.count):
            return _loss(self._denoiser(**calls.twice())[0])

    def run(
        self, calls: Calls, time_budget: TimeBudget, report: Callable[[ReconstructedBlock], None]
    ) -> float:
        """Reconstruct every block that the pass reaches, report each, and return the loss.

        Raises:
            ModelError: a masked layer whose input has no batch axis in front.
            NonFiniteError: NaN or Inf in what a layer reads or answers.
        """
        self._time_budget, self._report = time_budget, report
        with torch.no_grad(), paired_layers(self._denoiser, self._layers(), calls.count) as pairs:
            for pair in pairs.values():
                pair.visit = self._visit
            with self._hooked(pairs, calls.count):
                return _loss(self._denoiser(**calls.twice())[0])

    def _layers(self) -> dict[str, nn.Module]:
        return {name: student.layer for name, student in self._students.items()}

    @contextmanager
    def _hooked(self, pairs: Mapping[str, LayerPair], rows: int) -> Iterator[None]:
        handles = []
        for block in self._blocks:
            if block.single:
                continue

            def leave(
                module: nn.Module,
                args: tuple[Any, ...],
                kwargs: dict[str, Any],
                output: Any,
                block: Block = block,
            ) -> Any:
                mine = [pairs[name] for name in block.layers]
                # None: the output stays as it is.
                if block.name not in self._open:
                    return None
                with alone(mine):
                    return self._leave(block, BlockCall(module, args, kwargs, output, rows))

            module = self._denoiser.get_submodule(block.name)
            handles.append(module.register_forward_hook(leave, with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _visit(self, name: str, x: Tensor, target: Tensor) -> None:
        """Fit a layer that the pass reaches."""
        block = self._home[name]
        if block.name in self.rebuilt:
            return
        assert self._time_budget is not None
        if block.name not in self._open:
            self._open[block.name] = self._opened(block)
        state = self._open[block.name]
        if name in state.fits:
            return
        student = self._students[name]
        seconds = self._time_budget.share(self._size_of(name))
        effort = self._throughput.effort(student.layer, seconds)
        began = time.monotonic()
        try:
            fit = fit_layer(
                student.layer, Examples(x, target), student.mask, effort=effort,
                ridge=self._fitting.ridge, generator=Generator().manual_seed(self._seeds[name]),
            )  # fmt: skip
        except NonFiniteError as error:
            raise NonFiniteError(f"{name}: {error}") from error
        student.take((fit.weight,) if fit.bias is None else (fit.weight, fit.bias))
        self._throughput.add(student.layer, effort, time.monotonic() - began)
        self._time_budget.done(self._size_of(name))
        state.fits[name] = fit
        if block.single:
            self._close(ReconstructedBlock(name, fit.before, fit.after, 0))

    def _opened(self, block: Block) -> _Open:
        assert self._time_budget is not None
        start = {name: self._students[name].copies() for name in block.layers}
        return _Open(
            block, start, self._time_budget.now, self._time_budget.share(self._size(block)), {}
        )

    def _leave(self, block: Block, call: BlockCall) -> Any:
        """Refine a block whose layers are fitted, keep the best that it was, and answer again."""
        if not call.target:
            raise ModelError(
                f"{block.name}: its output does not have one row per sample; keep it dense"
            )
        state = self._open[block.name]
        students = [self._students[name] for name in block.layers]
        candidates = [self._candidate(call, students)]
        for name in block.layers:
            self._students[name].take(state.start[name])
        candidates.append(self._candidate(call, students))
        _take(students, min(candidates, key=_loss_of)[1])
        generator = Generator().manual_seed(self._seeds[block.layers[0]])
        steps = refine(call, students, self._tuning, generator, lambda: self._spent(state))
        if steps:
            candidates.append(self._candidate(call, students))
        best = min(candidates, key=_loss_of)
        _take(students, best[1])
        power = max(call.power(_JUDGED), torch.finfo(torch.float32).tiny)
        self._close(
            ReconstructedBlock(block.name, candidates[1][0] / power, best[0] / power, steps)
        )
        return None if best is candidates[0] else call.output()

    def _candidate(
        self, call: BlockCall, students: list[Student]
    ) -> tuple[float, list[tuple[Tensor, ...]]]:
        return call.judge(_JUDGED), [student.copies() for student in students]

    def _spent(self, state: _Open) -> float:
        """Return the share of a block's time that is over."""
        assert self._time_budget is not None
        if state.seconds is None:
            return 0.0 if self._tuning.steps is not None else 1.0
        spent = self._time_budget.now - state.began
        return spent / state.seconds if state.seconds > 0 else 1.0

    def _close(self, rebuilt: ReconstructedBlock) -> None:
        self.rebuilt[rebuilt.block] = rebuilt
        del self._open[rebuilt.block]
        self._report(rebuilt)

    def _size(self, block: Block) -> int:
        return sum(self._size_of(name) for name in block.layers)

    def _size_of(self, name: str) -> int:
        return sum(p.numel() for p in self._students[name].parameters())

    def tensors(self, *, done: bool) -> dict[str, Tensor]:
        """Return the parameters of the student's layers by name; those of blocks done, or all."""
        found: dict[str, Tensor] = {}
        for name, student in self._students.items():
            if done and self._home[name].name not in self.rebuilt:
                continue
            found |= {f"{name}.{part}": p.detach() for part, p in student.layer.named_parameters()}
        return found

    def restore(
        self, tensors: Mapping[str, Tensor], rebuilt: tuple[ReconstructedBlock, ...]
    ) -> None:
        """Go on where ``tensors(done=True)`` was taken."""
        self.rebuilt = {block.block: block for block in rebuilt}
        for name, student in self._students.items():
            if self._home[name].name in self.rebuilt:
                parts = student.layer.named_parameters()
                student.take([tensors[f"{name}.{part}"] for part, _ in parts])


def _take(students: list[Student], values: list[tuple[Tensor, ...]]) -> None:
    for student, value in zip(students, values, strict=True):
        student.take(value)


def _loss_of(candidate: tuple[float, list[tuple[Tensor, ...]]]) -> float:
    return candidate[0] if math.isfinite(candidate[0]) else math.inf


def _loss(answers: Tensor) -> float:
    mine, others = answers.float().chunk(2)
    loss = float((mine - others).square().mean())
    if not math.isfinite(loss):
        raise NonFiniteError(f"reconstruct: the denoiser's answer differs by {loss}")
    return loss


def _ignore(rebuilt: ReconstructedBlock) -> None:
    del rebuilt
