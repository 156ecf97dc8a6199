"""What is known of each model family, and where a model's tensors lie."""
