"""Settings: one dataclass per section, TOML reading and writing, model and run presets. Imports no torch."""
