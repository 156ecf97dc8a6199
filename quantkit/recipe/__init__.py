"""Recipes: the settings for a model, as frozen values read from YAML."""
