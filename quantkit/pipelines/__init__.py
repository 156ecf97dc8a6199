"""Opening diffusers pipelines and running them over prompts."""
