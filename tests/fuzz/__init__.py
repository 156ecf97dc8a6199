"""A seeded fuzzer of what quantkit reads: ``python -m tests.fuzz --help``.

A case is a kind of damage and a seed. ``kinds`` lists the tables of kinds, ``subjects`` makes what
is damaged, ``attempt`` runs one case, ``pool`` runs many in processes that may hang or die.
"""
