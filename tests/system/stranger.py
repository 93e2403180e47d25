"""A program with torch but without SameBits that reads a torch.distributed.checkpoint directory on any ranks.

``stranger.py DIRECTORY RANK WORLD_SIZE STORE_FILE`` prints the hash of the full weights and of Adam's first moments.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tests.system.sharded_script import FEATURES, sharded, whole_sha256


def main() -> None:
    directory, rank, world_size, store = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    dist.init_process_group("gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size)
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    model(torch.randn(4, FEATURES)).sum().backward()
    optimizer.step()  # so that there is optimizer state to load into
    content = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": -1}
    dcp.load(content, checkpoint_id=directory)
    model.load_state_dict(content["model"])
    optimizer.load_state_dict(content["optimizer"])
    moments = sum(float(one["exp_avg"].full_tensor().double().sum()) for one in optimizer.state.values())
    rate = optimizer.param_groups[0]["lr"]
    print(f"epoch {content['epoch']} rate {rate:.9g} moments {moments:.17g} sha256={whole_sha256(model)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
