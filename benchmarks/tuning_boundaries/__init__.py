"""What boundaries cost while a trained model is tuned on another task. See `__main__.py`."""
