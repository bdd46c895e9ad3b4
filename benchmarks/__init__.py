"""Instruments to run before and after a change: each module writes results/<name>.json. `table` writes the page."""
