"""Loading a packed component in diffusers and transformers, and saving it again."""
