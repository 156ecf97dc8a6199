"""The CPU's memory in place of a GPU's: what a device takes of it, and who keeps it."""

import torch

from quantkit.device.gpu.devices import Memory


class Keeper:
    """Memory that was taken and not given back, by address."""

    def __init__(self):
        self.taken: dict[int, torch.Tensor] = {}
        self.streams: list[int] = []

    def take(self, size, stream):
        self.streams.append(stream)
        content = torch.full((size,), 0xEE, dtype=torch.uint8)
        self.taken[content.data_ptr()] = content
        return content.data_ptr()

    def give_back(self, address):
        self.taken.pop(address).fill_(0xDD)

    def memory(self):
        new = torch._C._dynamo.guards._empty_strided_cpu  # type: ignore[attr-defined]
        return Memory(new, self.take, self.give_back)
