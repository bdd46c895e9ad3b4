"""Know before the run how busy it will be: the paper's simulator, the choice of settings, their check. No torch."""
