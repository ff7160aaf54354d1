"""What lossy boundaries do to a small ResNet, as arXiv 2401.07788 asked it. See `__main__.py`."""
