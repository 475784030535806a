"""What operators want, as the scheduler actor keeps it."""
