"""Packed layers: their modules, operators, and inputs as codes."""
