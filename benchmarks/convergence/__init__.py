"""What each boundary method costs in loss, token for token. See `__main__.py`."""
