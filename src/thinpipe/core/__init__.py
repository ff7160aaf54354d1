"""Words that every part shares. Imports nothing of ours and no torch."""
