"""Train a small decoder-only transformer on a device mesh: HSDP or FSDP2, tensor, sequence and loss parallel.

The text is the source code of Python's standard library, read as bytes. No process ever holds the whole model: it is
built without memory, cut, and filled part by part. Run it with ``samebits run -n 4 train.py --dp-shard 2 --tp 2``.
"""

from __future__ import annotations

import argparse
import hashlib
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils.data import DataLoader, TensorDataset

import samebits

BYTES = 256
HEAD = 16  # features of one attention head


class Attention(nn.Module):
    """Causal self-attention; a tensor-parallel rank computes its own heads only."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: torch.Tensor = self.wo(heads.transpose(1, 2).flatten(2))
        return out


class FeedForward(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.w2(F.silu(self.w1(x)))
        return out


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(dim), Attention(dim)
        self.ffn_norm, self.feed_forward = nn.RMSNorm(dim), FeedForward(dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        out: torch.Tensor = x + self.feed_forward(self.ffn_norm(x))
        return out


class Transformer(nn.Module):
    """Bytes (batch, length) to logits (batch, length, 256)."""

    def __init__(self, dim: int, layers: int, length: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(BYTES, dim), nn.Embedding(length, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(layers))
        self.norm, self.output = nn.RMSNorm(dim), nn.Linear(dim, BYTES, bias=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.tokens(text) + self.positions(torch.arange(text.shape[1], device=text.device).expand_as(text))
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.output(self.norm(x))
        return logits

    def init_weights(self) -> None:
        """Fill the weights; called in the first generation, after the model is cut."""
        for module in self.modules():
            if isinstance(module, nn.RMSNorm):
                module.reset_parameters()
            elif isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)


def parallelize(model: Transformer, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
    """Cut the model over the mesh: tensor parallel within "tp", HSDP over the two data-parallel dimensions."""
    embedding = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    output = ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False)
    whole_sequence = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    outer = {"tokens": embedding, "positions": embedding, "norm": SequenceParallel(), "output": output}
    parallelize_module(model, mesh["tp"], outer)
    for block in model.blocks:
        plan = {
            "attention_norm": SequenceParallel(),
            "attention": whole_sequence,
            **{f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")},
            "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
            "ffn_norm": SequenceParallel(),
            "feed_forward": whole_sequence,
            "feed_forward.w1": ColwiseParallel(),
            "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(block, mesh["tp"], plan)
        fully_shard(block, mesh=mesh["dp_replicate", "dp_shard"], mp_policy=policy)
    fully_shard(model, mesh=mesh["dp_replicate", "dp_shard"], mp_policy=policy)


def standard_library(length: int, samples: int) -> TensorDataset:
    """Cut the standard library's source into texts of ``length`` + 1 bytes, the last being the next one's first."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    source = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    return TensorDataset(source.unfold(0, length + 1, length)[:samples].long())


def sha256(model: nn.Module) -> str:
    """Hash the whole weights, one at a time; a collective."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.full_tensor().detach().cpu().numpy().tobytes())  # type: ignore[attr-defined]
    return digest.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--dp-replicate", type=int, default=1, help="copies of the sharded model")
    parser.add_argument("--dp-shard", type=int, default=1, help="ranks that each copy is sharded over")
    parser.add_argument("--tp", type=int, default=1, help="ranks that share each matrix and each sequence")
    parser.add_argument("--mixed-precision-param", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=8, help="texts per data-parallel rank and step")
    parser.add_argument("--length", type=int, default=64, help="bytes per text; a multiple of --tp")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--interval", type=int, default=20, help="steps between checkpoints")
    args = parser.parse_args()

    samebits.init()
    torch.manual_seed(1)
    sizes = (args.dp_replicate, args.dp_shard, args.tp)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
    with torch.device("meta"):  # no memory: elastic.run allocates each rank's part and calls init_weights()
        model = Transformer(args.dim, args.layers, args.length)
    parallelize(model, mesh, MixedPrecisionPolicy(param_dtype=getattr(torch, args.mixed_precision_param)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    texts = standard_library(args.length, samples=4096)
    sampler = samebits.ElasticSampler(texts, seed=1)
    loader = DataLoader(texts, args.batch_size, sampler=sampler, drop_last=True, generator=torch.Generator())
    checkpoint = samebits.CheckpointConfig(save_checkpoint_steps=args.interval)
    state = samebits.elastic.TorchState(
        model, optimizer, sampler=sampler, epoch=0, rng="per_step", checkpoint=checkpoint
    )

    @samebits.elastic.run
    def train(state: samebits.elastic.TorchState) -> str:
        while state.completed_steps < args.steps:
            sampler.set_epoch(state.epoch)
            for batch, (text,) in enumerate(loader):
                optimizer.zero_grad()
                with loss_parallel():
                    logits = model(text[:, :-1])
                    loss = F.cross_entropy(logits.flatten(0, 1).float(), text[:, 1:].flatten())
                    loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                sampler.record_batch(batch, args.batch_size)
                state.report(loss=loss, total_steps=args.steps)
                state.commit()
                if state.completed_steps == args.steps:
                    break
            else:
                state.epoch += 1
        return sha256(model)

    print(f"final step={args.steps} sha256={train(state)}", flush=True)


if __name__ == "__main__":
    main()
