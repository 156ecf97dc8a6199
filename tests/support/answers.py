"""Answers of the tiny UNet, and a process that gives one: all that it imports is here."""

import pickle

import torch


@torch.no_grad()
def step(model, time=500):
    generator = torch.Generator().manual_seed(5)
    x, text = (torch.randn(s, generator=generator) for s in ((2, 4, 8, 8), (2, 16, 32)))
    dtype = model.dtype
    return model(x.to(dtype), torch.tensor(time), text.to(dtype)).sample


def answer(data, queue):
    """Put what a pickled model answers into a queue."""
    queue.put(step(pickle.loads(data)).tolist())
