"""Recipes, as YAML files."""
