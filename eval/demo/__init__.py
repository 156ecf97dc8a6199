"""The whole job on the bundled pipeline, and the world that it was trained on."""
