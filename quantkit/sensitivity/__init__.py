"""Sensitivity of layers to each treatment, and choosing a treatment per layer."""
