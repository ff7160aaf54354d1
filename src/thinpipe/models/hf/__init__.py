"""Import and export of Hugging Face folders: configurations, weights, and the modeling code of an exported model with a
boundary projection."""
