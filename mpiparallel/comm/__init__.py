"""The one door: every message of mpiparallel goes through a Group and is counted in a Ledger."""
