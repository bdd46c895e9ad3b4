"""Loss and norm are read some steps later, and every step is written once, in order, with its own values."""

from functools import partial
from types import SimpleNamespace

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from diloco.runs.schema import Step
from diloco.train.run import Readings, start_reading, train_step

REST = {"lr": 0.0, "step_seconds": 0.0, "tokens_per_second": 0.0, "bytes_sent": 0, "bytes_received": 0,
        "seconds_hidden": 0.0, "seconds_exposed": 0.0, "in_flight": 0}  # fmt: skip


def test_a_step_is_waited_for_only_when_it_is_written():
    waited, written = [], []
    readings = Readings(written.append)

    def read(step):
        waited.append(step)
        return [float(step), 10.0 * step]

    for step in range(1, 6):
        readings.write(pending=1)
        readings.add(partial(read, step), partial(Step, step, 0.0, 0, **REST))
        assert waited == list(range(1, step - 1))
    assert readings.last == written[-1] and readings.last.step == 3
    readings.write()
    assert waited == [1, 2, 3, 4, 5]
    assert [(step.step, step.loss, step.grad_norm) for step in written] == [(s, s, 10 * s) for s in range(1, 6)]


def test_what_was_begun_to_be_read_does_not_change_with_its_source():
    loss, norm = torch.tensor(1.5), torch.tensor(2.5)
    read = start_reading(loss, norm)
    loss.zero_()
    assert read() == [1.5, 2.5]


class Scalars(TorchDispatchMode):
    """Counts the values that the host asks for, for each of which it would wait for an accelerator."""

    asked = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.asked += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


def test_a_training_step_asks_the_device_for_no_value():
    model = nn.Linear(3, 1)

    def forward(x, y):
        loss = (model(x) - y).square().mean()
        return SimpleNamespace(loss=loss, cross_entropy=loss)

    run = SimpleNamespace(
        config=SimpleNamespace(accumulate=2, clip=1.0), device=torch.device("cpu"), model=model, forward=forward,
        optimizers=[torch.optim.SGD(model.parameters())], diloco=None, tokens_per_step=1,
        batches=SimpleNamespace(next=lambda: (torch.ones(2, 3), torch.zeros(2, 1))),
    )  # fmt: skip
    with torch.no_grad():
        expected = forward(torch.ones(2, 3), torch.zeros(2, 1)).loss.item()
    with Scalars() as scalars:
        read = train_step(run, 0.1)
        assert scalars.asked == 0
        loss, norm = read()
    assert loss == expected and norm > 0
