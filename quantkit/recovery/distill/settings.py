"""Settings of a distillation."""

from dataclasses import dataclass

from quantkit.errors import RecipeError

_GIB = 1 << 30

_COUNTS = (
    "steps",
    "batch",
    "sampling_steps",
    "sampling_batch",
    "trajectories",
    "refresh",
    "watch_every",
    "watched",
)


@dataclass(frozen=True)
class DistillSettings:
    """Settings of a distillation: duration, learning rate and the teacher's trajectories."""

    #: training steps; None: the time decides
    steps: int | None = None
    #: wall time of trajectories and training together; None: the steps decide
    seconds: float | None = 120.0
    #: rows of one training step
    batch: int = 256
    #: highest learning rate
    rate: float = 3e-4
    #: steps until it is reached
    warm_up: int = 100
    weight_decay: float = 0.0
    #: decay of the moving average of the weights, which is what is kept
    average: float = 0.999
    #: recompute activations in the backward pass: less memory, a third more time
    checkpointing: bool = False
    #: replay the student's passes as CUDA graphs; ignored on the CPU and with checkpointing
    graphs: bool = True
    #: denoising steps: a trajectory has half to twice as many, so that many timesteps are trained
    sampling_steps: int = 20
    #: how calls are drawn: uniform, or schedule: half of them by their effect on the final sample
    weighting: str = "uniform"
    #: None takes the pipeline's own default
    guidance: float | None = None
    #: prompts that the teacher denoises at a time
    sampling_batch: int = 256
    #: trajectories kept at a time, the oldest replaced as training goes
    trajectories: int = 4096
    #: memory that they may take
    bank_bytes: int = 4 * _GIB
    #: training steps after which one sampling batch is replaced
    refresh: int = 200
    #: training steps after which pictures are made and compared; None: never
    watch_every: int | None = 500
    #: how many pictures
    watched: int = 8
    #: optimizer and average in the CPU's memory, 16-bit weights on the GPU, stepped one by one
    offload: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse values that no run can have.

        Raises:
            RecipeError: no end, or a number out of range.
        """
        if self.steps is None and self.seconds is None:
            raise RecipeError("recovery: neither steps nor seconds is set; set at least one")
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise RecipeError(f"recovery: {name} {value}, expected at least 1")
        if self.seconds is not None and not self.seconds > 0:
            raise RecipeError(f"recovery: seconds {self.seconds:g}, expected more than 0")
        if not self.rate > 0:
            raise RecipeError(f"recovery: rate {self.rate:g}, expected more than 0")
        if not 0 <= self.average < 1:
            raise RecipeError(f"recovery: average {self.average:g}, expected 0 <= average < 1")
