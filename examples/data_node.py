"""A model of which byte follows which, trained on text that only data nodes have:

p2p-diloco data corpus/ --invite main.invite
p2p-diloco join --invite main.invite -- python examples/data_node.py
"""

import json
import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from p2p_diloco import Peer

LENGTH = 64


def batch(lines: list[str]) -> Tensor:
    """The first bytes of lines, filled up with zeros: [lines, LENGTH]."""
    return torch.tensor([list(line.encode()[:LENGTH].ljust(LENGTH, b"\0")) for line in lines])


model = nn.Sequential(nn.Embedding(256, 64), nn.Linear(64, 256))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

with Peer.from_env(model, optimizer) as peer:
    corpus = peer.slices("corpus")  # waits until a data node answers
    shard = peer.shard(corpus.samples, epochs=2)  # each line once an epoch, over all peers
    for lines in shard.loader(batch_size=32, collate_fn=batch):
        loss = F.cross_entropy(model(lines[:, :-1]).transpose(1, 2), lines[:, 1:])
        loss.backward()
        peer.report(loss=loss.item(), samples=len(lines))
        optimizer.step()
        optimizer.zero_grad()
    model.load_state_dict(peer.global_state_dict())
    lines = batch([corpus.samples[0]])
    loss = F.cross_entropy(model(lines[:, :-1]).transpose(1, 2), lines[:, 1:])
    sys.stdout.write(json.dumps({"complete": shard.complete, "slices": len(corpus), "loss": loss.item()}) + "\n")
