"""Small recurrent models: layers of every kind, their states read and handed on, and loops of cells."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Built = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


class Translator(nn.Module):
    """An encoder whose last states are the decoder's first; five units, which two ranks do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.LSTM(3, 5, 2, batch_first=True), nn.LSTM(3, 5, 2, batch_first=True)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        _, states = self.encoder(x)
        made, (_, c) = self.decoder(y[:, :-1], states)
        return F.mse_loss(self.head(made), y[:, 1:]) + c.square().mean()


class Learned(nn.Module):
    """Both directions from a state that is learned, the batch first or second."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer, self.start = layer, nn.Parameter(torch.randn(2 * layer.num_layers, 1, layer.hidden_size))
        self.head = nn.Linear(2 * layer.hidden_size, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = x if self.layer.batch_first else x.transpose(0, 1)
        made, h = self.layer(x, self.start.expand(-1, y.shape[0], -1).contiguous())
        made = made if self.layer.batch_first else made.transpose(0, 1)
        return F.mse_loss(self.head(made), y) + h[-1].square().mean()


class Cells(nn.Module):
    """A loop of cells, one of each kind on top of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru, self.rnn = nn.LSTMCell(3, 6), nn.GRUCell(6, 4, bias=False), nn.RNNCell(4, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        a, c, b, d = (x.new_zeros(x.shape[0], n) for n in (6, 6, 4, 5))
        made = []
        for step in x.unbind(1):
            a, c = self.lstm(step, (a, c))
            b = self.gru(a, b)
            d = self.rnn(b, d)
            made.append(self.head(d))
        return F.mse_loss(torch.stack(made, 1), y)


class Layer(nn.Module):
    """One layer."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.layer = nn.LSTM(3, 4, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0].square().mean()


def _sequences(steps: int = 4) -> tuple[Tensor, Tensor]:
    return torch.randn(4, steps, 3), torch.randn(4, steps, 3)


def lstm() -> Built:
    return Translator(), _sequences(), {}


def gru() -> Built:
    return Learned(nn.GRU(3, 4, 2, bidirectional=True)), _sequences(), {}


def rnn() -> Built:
    return (
        Learned(nn.RNN(3, 4, nonlinearity="relu", bias=False, batch_first=True, bidirectional=True)),
        _sequences(),
        {},
    )


def cells() -> Built:
    return Cells(), _sequences(3), {}


def alone() -> Built:
    return Layer(), (torch.randn(2, 7, 3),), {}


def projected() -> Built:
    return Layer(proj_size=2), (torch.randn(2, 3, 3),), {}
