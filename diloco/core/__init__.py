"""Streaming DiLoCo itself: the algorithm, and what attaches it to a model."""
