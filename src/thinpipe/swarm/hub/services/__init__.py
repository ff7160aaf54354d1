"""Request handlers of the hub: files, tokens, the store, the all-reduce of each step."""
