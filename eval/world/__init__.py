"""The world of the bundled pipeline: its scenes, and its feature network."""
