"""The jobs of quantkit, one module each: typed functions that print nothing.

Everything here stands above the packages that do the work and below the command line, which parses
options, calls these functions and prints what they return. ``quantkit`` itself exports most of it.
"""
