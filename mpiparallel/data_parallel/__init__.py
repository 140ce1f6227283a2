"""Data parallelism: replicas of the model that agree on a gradient after every step."""
