"""The run directory: one schema, used by whoever writes and whoever reads it."""
