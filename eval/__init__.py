"""Images, metrics, generation, comparison and the report."""
