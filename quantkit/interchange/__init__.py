"""Files of other programs: the layouts of their denoisers, and reading and writing them."""
