"""Upper limits of numbers in input: a larger one is a slip of the keyboard, or hostile."""

#: Prompts, pictures at a time, rounds.
MAX_COUNT = 1_000_000
#: Denoising steps; schedulers lay out every one of them at the start.
MAX_STEPS = 10_000
#: torch and numpy take seeds of 64 bits, and each prompt adds one.
MAX_SEED = 2**62
#: Threads of packing.
MAX_THREADS = 1024
#: Width and height of latents.
MAX_SIDE = 4096
