"""The run directory: its settings, folder, schema, writer and reader."""
