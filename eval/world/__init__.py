"""The demo pipeline's world: captioned pictures and the training script."""
