"""Estimates of a step on a card that is not here."""
