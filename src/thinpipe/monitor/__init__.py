"""Live view of a run from its events: terminal, local web page, and metric exporters. Takes no part in training."""
