"""Patterns: several calls of a program that one of our operators computes."""
