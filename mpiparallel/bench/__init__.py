"""Benchmarks: what this machine does, always measured against something in the same run."""
