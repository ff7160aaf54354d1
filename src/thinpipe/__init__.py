"""thinpipe trains language models whose layers are spread over machines joined by ordinary internet links.

Importing the package imports nothing heavy: take what you need from `thinpipe.models` and `thinpipe.subspace`.
"""

__version__ = "0.1.0"
