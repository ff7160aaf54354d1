"""Compression while a pretrained model is fine-tuned, after arXiv 2401.07788. See `__main__.py`."""
