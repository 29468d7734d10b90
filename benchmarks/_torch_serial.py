"""PyTorch's serial training step of the networks in `_nets.py`: run by `training_step`.

    python benchmarks/_torch_serial.py {dense,gru,convolutions} REPEATS SIZES...

It imports nothing but PyTorch, so that any interpreter which has that can run it.
"""

from __future__ import annotations

import json
import sys
import time

import torch
from torch import nn


class Convolutions(nn.Module):
    def __init__(self, channels, layers=32, batch=50, size=28):
        super().__init__()

        def convolutions():
            return nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in range(layers))

        self.first, self.second = convolutions(), convolutions()
        self.shape = batch, channels, size, size

    def forward(self, x):
        dt = 1 / len(self.first)
        for a, b in zip(self.first, self.second, strict=True):
            x = x + dt * torch.relu(b(torch.relu(a(x))))
        return x


class Dense(nn.Module):
    def __init__(self, layers, width=64, batch=64):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.shape = batch, width

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) / len(self.layers)
        return x


class GRU(nn.Module):
    """Implicit GRU cells upon each other."""

    def __init__(self, steps, batch, hidden=100, features=9, stacked=2):
        super().__init__()
        sizes = [features] + [hidden] * (stacked - 1)
        self.of_inputs = nn.ModuleList(nn.Linear(n, 3 * hidden) for n in sizes)
        self.of_state = nn.ModuleList(nn.Linear(hidden, 3 * hidden) for _ in sizes)
        self.hidden, self.shape = hidden, (steps, batch, features)

    def forward(self, x):
        states = [x.new_zeros(x.shape[1], self.hidden) for _ in self.of_state]
        for z in self.of_inputs[0](x):
            for i, own in enumerate(self.of_state):
                z = z if i == 0 else self.of_inputs[i](states[i - 1])
                xr, xz, xn = z.chunk(3, dim=-1)
                hr, hz, hn = own(states[i]).chunk(3, dim=-1)
                new = torch.tanh(xn + torch.sigmoid(xr + hr) * hn)
                d = 1 - torch.sigmoid(xz + hz)
                states[i] = (states[i] + d * new) / (1 + d)
        return states[-1]


NETS = {"dense": Dense, "gru": GRU, "convolutions": Convolutions}


def main():
    torch.set_num_threads(1)
    net = NETS[sys.argv[1]](*map(int, sys.argv[3:]))
    x = torch.randn(net.shape, requires_grad=True)
    shortest = float("inf")
    for _ in range(int(sys.argv[2]) + 1):
        net.zero_grad()
        start = time.perf_counter()
        net(x).square().mean().backward()
        shortest = min(shortest, time.perf_counter() - start)
    print(json.dumps({"seconds": shortest, "version": torch.__version__}))


if __name__ == "__main__":
    main()
