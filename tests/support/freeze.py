"""Imported last by the server that tests fork processes from.

What it has loaded is not garbage. A collector that looks at it in every process would write to all of its memory, and
give each process a copy of it.
"""

import gc

gc.collect()
gc.freeze()
