"""One thread, as in the processes that the tests start: sums of floats depend on how they are split."""

import torch

torch.set_num_threads(1)
