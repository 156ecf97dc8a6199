"""Recovery by reconstruction: block after block brought to its teacher's answers."""
