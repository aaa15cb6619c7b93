# SPDX-License-Identifier: Apache-2.0
"""Federated averaging with and without matching: two clients, one with the digits 0 to 4, the other with 5 to 9.

    python examples/federated.py --rounds 8 --epochs 3
    python examples/federated.py --rounds 8 --epochs 3 --apart

Every round, the server sends its model out, each client trains it on its own digits, and the server averages what
comes back (FedAvg, McMahan et al., 2017): as it is, or after matching every client to the model that was sent. --apart:
in the first round the clients start from models of their own, and the second is matched to the first; at level full
the residual stream moves, too.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
import transformers
from torch.nn.functional import cross_entropy
from transformers import ViTConfig, ViTForImageClassification

import onebasin
from onebasin.data import digits

ARMS = ("none", "paper")  # the level of matching; none is FedAvg


def new_model(seed: int) -> ViTForImageClassification:
    torch.manual_seed(seed)
    config = ViTConfig(hidden_size=48, num_hidden_layers=3, num_attention_heads=4, intermediate_size=192, image_size=8,
                       patch_size=2, num_channels=1, num_labels=10)  # fmt: skip
    return ViTForImageClassification(config)


def copy_of(model: ViTForImageClassification) -> ViTForImageClassification:
    twin = ViTForImageClassification(model.config)
    twin.load_state_dict(model.state_dict())
    return twin


def train(model: ViTForImageClassification, own: range, epochs: int, seed: int) -> None:
    """A client: train the model on the digits that it owns."""
    pixels, labels = digits("train")
    mine = torch.isin(labels, torch.tensor(list(own)))
    pixels, labels = pixels[mine], labels[mine]
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.train()
    for _ in range(epochs):
        for batch in torch.randperm(len(labels), generator=generator).split(64):
            loss = cross_entropy(model(pixel_values=pixels[batch]).logits, labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    model.eval()


def accuracy(model: ViTForImageClassification) -> float:
    pixels, labels = digits("test")
    with torch.no_grad():
        return float((model.eval()(pixel_values=pixels).logits.argmax(-1) == labels).float().mean())


def rounds_of(level: str, rounds: int, epochs: int, apart: bool = False, seed: int = 0) -> Iterator[float]:
    """The server's loop: the test accuracy of its model after every round."""
    server = new_model(seed)
    for number in range(rounds):
        first = apart and number == 0
        clients = [new_model(seed + 1 + i) if first else copy_of(server) for i in range(2)]
        for i, (client, own) in enumerate(zip(clients, (range(5), range(5, 10)), strict=True)):
            train(client, own, epochs, seed=100 * number + i)
        if level == "none" or first:
            merged = onebasin.merge(clients, match=level, anchor=0, verify=False, verdict=False)["model"]
        else:
            # Clients that were sent one model share its stream, whatever level brought the first ones together.
            matched = [onebasin.match(client, server, match="paper", verify=False)["model"] for client in clients]
            merged = onebasin.merge(matched, match="none", verify=False, verdict=False)["model"]
        server = merged
        yield accuracy(server)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=3, help="of every client in every round")
    parser.add_argument("--apart", action="store_true", help="clients start the first round from models of their own")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    print("accuracy in % after each round")
    for level in (*ARMS, "full") if given.apart else ARMS:
        found = rounds_of(level, given.rounds, given.epochs, given.apart, given.seed)
        print(f"{'FedAvg' if level == 'none' else 'matched: ' + level:>16}", *(f"{100 * x:5.1f}" for x in found))


if __name__ == "__main__":
    main()
