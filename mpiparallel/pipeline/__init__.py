"""Pipeline parallelism: schedules as data, their messages, proof, timing and execution."""
