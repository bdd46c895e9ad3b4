"""Measured figures: each module writes results/<name>.json, and `table` makes docs/benchmarks.md of them."""
