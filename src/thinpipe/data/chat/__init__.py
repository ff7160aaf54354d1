"""Chats to tokens with flags: formats, the tokenizer's own template, and which tokens are trained on."""
