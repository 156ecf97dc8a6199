"""Steps replayed from a CUDA graph, so that a slow host does not count as a slow model."""

from collections.abc import Callable

import torch
from torch import Tensor

#: Before a capture: what is compiled, chosen or allocated at a first call is there then.
_WARM_UP = 3


def captured(step: Callable[[], Tensor], device: torch.device) -> Callable[[], Tensor]:
    """Return a call that replays what ``step`` queues, and returns its output.

    Args:
        step: reads the same memory at every call, and waits for nothing that the device computes.
        device: a GPU; on the CPU there is nothing to capture, and ``step`` is returned.
    """
    if device.type != "cuda":
        return step
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(_WARM_UP):
            step()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = step()

    def replay() -> Tensor:
        graph.replay()
        return output

    return replay
