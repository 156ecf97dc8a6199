"""The operations: what each computes, how it is checked, called, and done in plain PyTorch."""
