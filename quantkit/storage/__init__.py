"""Files as bytes and values: written whole or not at all, read within limits."""
