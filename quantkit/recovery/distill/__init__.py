"""Recovery by distillation: a student trained on the dense model's trajectories."""
