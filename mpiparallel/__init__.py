"""Hybrid parallelism for large-model training, in NumPy and mpi4py, with every message in sight."""

__version__ = "0.1.0"
