"""Two flags of a token of a chat, in the unused upper bits of its id: on disk, in memory and in messages.

Token ids of plain text have no flags, and nothing here concerns them.
"""

TRAINED = 1 << 30
"""The token is trained on: its loss counts. The first token of a document never is."""
BEGINS = 1 << 31
"""A document begins with this token."""
ID_MASK = TRAINED - 1
"""Bits of the id itself."""
FLAG_SHIFT, FLAG_BITS = 30, 2
MAX_FLAGGED_VOCABULARY = TRAINED
"""Largest vocabulary whose ids leave the bits of the flags free."""
