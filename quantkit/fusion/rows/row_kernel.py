"""A generated kernel as an operator of a program."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.device import log
from quantkit.device.backends import Backend
from quantkit.device.gpu.devices import find_device
from quantkit.device.gpu.kernel import GeneratedKernel
from quantkit.device.gpu.launcher import prepare_launch
from quantkit.device.host.library import load_generated
from quantkit.fusion.program import Layout


@dataclass(frozen=True, eq=False)
class RowKernel:
    """One kernel for a group of calls."""

    kernel: GeneratedKernel
    #: of its results
    layouts: tuple[Layout, ...]
    #: of its results that are codes; empty for others
    formats: tuple[str, ...]

    def __str__(self) -> str:
        """Return its symbol."""
        return self.kernel.symbol

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the results of the calls, in new memory.

        Args:
            tensors: of the layouts that it was generated for.

        Raises:
            KernelError: it cannot be compiled, loaded or launched.
        """
        device = self.layouts[0].device
        made = tuple(
            torch.empty_strided(one.shape, one.strides, dtype=one.dtype, device=device)
            for one in self.layouts
        )
        addresses = [tensor.data_ptr() for tensor in (*tensors, *made)]
        if device.type == "cuda":
            self._queue(device, addresses)
        else:
            self._run(addresses)
        return made

    def load(self) -> None:
        """Compile and load it, which its first call does otherwise.

        Raises:
            KernelError: it cannot be.
        """
        device = self.layouts[0].device
        if device.type == "cuda":
            prepare_launch(find_device(_index(device)), self.kernel, {})
        else:
            load_generated(self.kernel.symbol, self.kernel.text)

    def _queue(self, on: torch.device, addresses: Sequence[int]) -> None:
        device = find_device(_index(on))
        launcher = prepare_launch(device, self.kernel, {})
        with device.guard(device.index):
            launcher.queue(launcher.block(tuple(addresses)), device.stream(device.index))
        log.note(self.kernel.operation, self.kernel.name, Backend.GPU)

    def _run(self, addresses: Sequence[int]) -> None:
        function = load_generated(self.kernel.symbol, self.kernel.text)
        function.run((self.kernel.blocks, 1, 1), addresses, torch.get_num_threads())
        log.note(self.kernel.operation, self.kernel.name, Backend.HOST)


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
