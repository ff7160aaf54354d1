"""thinpipe trains language models whose layers are spread over machines joined by ordinary internet links.

Importing this package does not import torch; import what you need from subpackages such as `thinpipe.models`.
"""

__version__ = "0.1.0"
