"""What a graph does, on the CPU: the recorded tensors are read and written again."""

from contextvars import copy_context

from torch.utils import _pytree as pytree

from quantkit.device.log import KernelLog
from quantkit.pipelines import recorded_step, replayed_step
from quantkit.pipelines.recorded_step import Recording


def capture_on_cpu(run, device, pool):
    """Return what ``recorded_step.capture`` returns; each launch calls ``run`` as it was then."""
    del device
    output, context = run(), copy_context()

    def launch():
        made = pytree.tree_leaves(context.run(run))
        for old, new in zip(pytree.tree_leaves(output), made, strict=True):
            if old is not None:
                old.copy_(new)

    return Recording(launch, output, pool, KernelLog())


def record_on_cpu(monkeypatch, capture=capture_on_cpu):
    """Let the CPU record, as ``capture`` does."""
    monkeypatch.setattr(replayed_step, "_RECORDING", ("cpu",))
    monkeypatch.setattr(recorded_step, "run_aside", lambda run, _: run())
    monkeypatch.setattr(recorded_step, "capture", capture)
