"""DiLoCo inside the loops of frameworks, a module for each. Only the module of a framework imports it."""
