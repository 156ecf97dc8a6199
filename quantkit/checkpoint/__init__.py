"""The packed checkpoint: its specification (FORMAT.md), the reader and the writer."""
