"""The client of the Flower simulation. It is a separate module, so that Flower's workers import it once."""

from __future__ import annotations

import functools
from pathlib import Path

import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

from peers.work import Work

app = ClientApp()


@functools.cache
def prepare(path: str) -> tuple[Work, nn.Module]:
    """Return the work and a network, once in each worker."""
    torch.set_num_threads(1)
    work = Work.load(Path(path))
    return work, work.build()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train one client's epoch."""
    config = message.content["config"]
    work, model = prepare(config["work"])
    client, round_index = config["client"], config["round"]
    x, y = work.data(client)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimiser = torch.optim.SGD(model.parameters(), lr=work.lr)
    for batch in work.order(round_index, client).split(work.batch_size):
        optimiser.zero_grad()
        F.cross_entropy(model(x[batch]), y[batch]).backward()
        optimiser.step()
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": len(y)})})
    return Message(content=content, reply_to=message)
