"""What crosses a cut: the contract, the methods, the number formats. Knows nothing of processes or networks.

A message is one row of bytes per direction. Its length follows from the model and the settings alone, never from what
a peer says, and what a method states is what receive buffers, meters and plans all read. Import from the modules:
`settings` needs no torch.
"""
