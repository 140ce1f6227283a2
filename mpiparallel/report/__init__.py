"""What people look at: a run's progress and files, schedules as pictures and tables."""
