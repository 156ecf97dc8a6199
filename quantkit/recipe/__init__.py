"""Recipes: what to do with a model, as frozen values read from YAML."""
