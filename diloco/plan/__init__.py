"""Predict utilization before the run: the paper's simulator, the choice of settings, their check. No torch."""
