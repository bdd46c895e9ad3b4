"""One thread, as in the processes that the tests start: sums of floats depend on how they are split."""

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("shared machine", deadline=None)
settings.load_profile("shared machine")
