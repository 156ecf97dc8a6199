"""Two denoisers in one forward pass: student and teacher, each with half of the batch.

Layers that differ are pairs, which give the first half to the student's layer and the second to the
teacher's; all other modules treat the rows of a batch alike and are shared. So the forward pass of
the denoiser itself, whatever its graph, brings every layer the student's input and the teacher's
answer at the same moment, and nothing of a graph has to be known, cut or stored.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from quantkit.errors import ModelError

#: Told of a layer when the pass reaches it: its name, what the student reads and what the teacher
#: answers there. It may change the student's layer, whose answer is taken afterwards.
Visit = Callable[[str, Tensor, Tensor], None]


class LayerPair:
    """One layer of the student and the one of its teacher."""

    def __init__(self, name: str, student: nn.Module, teacher: nn.Module, rows: int) -> None:
        """Join two layers of one shape, for batches of ``rows`` rows of each."""
        self.name = name
        self.student = student
        self.teacher = teacher
        #: told of every call; None: nobody is
        self.visit: Visit | None = None
        #: the batch is the student's alone
        self.alone = False
        self._answer = teacher.forward
        self._rows = rows

    def __call__(self, x: Tensor) -> Tensor:
        """Return the student's answer and then the teacher's.

        Args:
            x: (2B, ...), the student's rows and then the teacher's; (b, ...) when alone.

        Raises:
            ModelError: the first axis is not the batch.
        """
        if self.alone:
            answer: Tensor = self.student(x)
            return answer
        if len(x) % (2 * self._rows):
            raise ModelError(
                f"{self.name}: the first axis of its input {tuple(x.shape)} is not the batch; "
                "keep this layer dense"
            )
        mine, others = x.chunk(2)
        target: Tensor = self._answer(others)
        if self.visit is not None:
            self.visit(self.name, mine, target)
        return torch.cat([self.student(mine), target])


@contextmanager
def paired_layers(
    model: nn.Module, students: Mapping[str, nn.Module], rows: int
) -> Iterator[dict[str, LayerPair]]:
    """Put a pair in place of each layer during the body.

    Args:
        model: the teacher; as it was afterwards.
        students: module path -> the student's layer.
        rows: of the student in a batch.

    Yields:
        the pairs by module path.
    """
    pairs = {
        name: LayerPair(name, student, model.get_submodule(name), rows)
        for name, student in students.items()
    }
    try:
        for pair in pairs.values():
            # Not another module in its place: what is around a layer asks for its attributes.
            vars(pair.teacher)["forward"] = pair
        yield pairs
    finally:
        for pair in pairs.values():
            vars(pair.teacher).pop("forward", None)


@contextmanager
def alone(pairs: Collection[LayerPair]) -> Iterator[None]:
    """Let pairs compute the student's half alone during the body, for batches of any size."""
    try:
        for pair in pairs:
            pair.alone = True
        yield
    finally:
        for pair in pairs:
            pair.alone = False
