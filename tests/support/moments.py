"""Second moments of inputs, without a collector that looks at several layers."""


def add_input(total, values, weight):
    """Add what a layer reads in a call to a ``MomentSum``, as a collector does."""
    seen = total.look(values, weight)
    total.mean.add_(seen.columns, alpha=weight)
    total.count(seen.rows, weight)
