"""Tokens of prompts that second moments of text encoders are taken from."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class TokenRows:
    """Rows that are looked at, of those that a text encoder's layers read."""

    #: (batch, tokens)
    shape: torch.Size
    #: into batch * tokens
    chosen: Tensor

    def of(self, values: Tensor) -> Tensor:
        """Return these rows of (batch, tokens, K), as (1, rows, K); other shapes as they are."""
        if values.shape[:-1] != self.shape:
            return values
        return values.flatten(0, 1)[self.chosen.to(values.device)].unsqueeze(0)


def token_rows(ids: Tensor) -> TokenRows:
    """Return the rows of all tokens that do not repeat the one before, and as many of the others.

    Prompts are filled up with one token: 20 of T5's 512 may be of the text, and rounding would be
    fitted to the filling. It is not left out, for denoisers read its embeddings, too.

    Args:
        ids: integers (batch, tokens).
    """
    repeats = torch.zeros_like(ids, dtype=torch.bool)
    repeats[:, 1:] = ids[:, 1:] == ids[:, :-1]
    found = []
    for row, repeated in enumerate(repeats.cpu()):
        own, others = (mask.nonzero().flatten() for mask in (~repeated, repeated))
        places = torch.linspace(0, max(len(others) - 1, 0), min(len(own), len(others)))
        found.append(torch.cat([own, others[places.round().long()]]) + row * ids.shape[1])
    return TokenRows(ids.shape, torch.cat(found))
