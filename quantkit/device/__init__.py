"""Operations, architectures, building and running kernels."""
