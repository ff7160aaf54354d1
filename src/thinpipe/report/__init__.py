"""What a run's event log shows: a page with figures, and a few lines in words."""
