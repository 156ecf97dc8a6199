"""The packed checkpoint: its rules (FORMAT.md), reading, writing."""
