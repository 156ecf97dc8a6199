"""The version, in a module of its own: any module may read it while the package is imported."""

__version__ = "0.1.0"
