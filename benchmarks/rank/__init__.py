"""Does rank collapse while a network learns? See `__main__.py`."""
