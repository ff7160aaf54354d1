"""Reports from a run's event log: an HTML or Markdown page with figures, and a short text summary."""
