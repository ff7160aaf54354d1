"""What a run's event log shows: the loss curve and a few lines in words."""
