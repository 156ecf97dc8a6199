"""Statistics of layer inputs: observing a running pipeline, storing, turning into scales."""
