"""What crosses a cut: the contract, the methods, the number formats. Knows nothing of processes or networks.

A message is one row of bytes per direction. Its length follows from the model and the settings alone, never from what
a peer says, and `nbytes` of a method is what receive buffers, meters and plans all read.
"""

from thinpipe.boundary.contract import BoundaryMethod, Crossing, MessageShape
from thinpipe.boundary.registry import METHODS, make_method
from thinpipe.boundary.settings import BoundarySection

__all__ = ["METHODS", "BoundaryMethod", "BoundarySection", "Crossing", "MessageShape", "make_method"]
