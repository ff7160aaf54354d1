"""Boundary codecs: encode the state sent from a segment to the next one and the gradient sent back, as bytes.

Independent of processes and networks. The length of a message follows from the model and the settings alone, never
from data that a peer sends; receive buffers, traffic statistics and `thinpipe plan` all use that length. Import from
the modules: `sizes` needs no torch.
"""
