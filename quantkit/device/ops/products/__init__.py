"""Products of codes and weights."""
