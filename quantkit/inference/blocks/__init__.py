"""Blocks of UNets with channels last, whose group norms write codes."""
