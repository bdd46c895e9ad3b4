"""The reference trainer. It imports the algorithm; the algorithm never imports it."""
