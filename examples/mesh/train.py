"""Train a small decoder-only transformer on a device mesh: pipeline, HSDP or FSDP2, tensor, sequence, loss parallel.

The text is the source code of Python's standard library, read as bytes. No process ever holds the whole model: it is
built without memory, cut, and filled part by part. Run it with ``samebits run -n 4 train.py --dp-shard 2 --tp 2``.
"""

from __future__ import annotations

import argparse
import hashlib
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
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
    """Bytes (batch, length) to logits (batch, length, 256), or one pipeline stage of that."""

    def __init__(self, dim: int, layers: int, length: int, *, is_first: bool = True, is_last: bool = True) -> None:
        super().__init__()
        self.is_first, self.is_last = is_first, is_last
        if is_first:
            self.tokens, self.positions = nn.Embedding(BYTES, dim), nn.Embedding(length, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(layers))
        if is_last:
            self.norm, self.output = nn.RMSNorm(dim), nn.Linear(dim, BYTES, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_first:
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device).expand_as(x))
        for block in self.blocks:
            x = block(x)
        return self.output(self.norm(x)) if self.is_last else x

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
    outer = {"tokens": embedding, "positions": embedding} if model.is_first else {}
    if model.is_last:
        outer |= {"norm": SequenceParallel(), "output": output}
    if outer:
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


def loss_of(logits: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), following.flatten())


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the parts of all its ranks; a collective for a DTensor."""
    full: torch.Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach()


def clip_gradients(part: nn.Module, stages: dist.ProcessGroup | None = None) -> None:
    """Clip to a norm of 1 over all stages."""
    norm = nn.utils.get_total_norm([one.grad for one in part.parameters() if one.grad is not None])
    norm = whole(norm).square()
    if stages is not None:
        dist.all_reduce(norm, group=stages)
    nn.utils.clip_grads_with_norm_(part.parameters(), 1.0, norm.sqrt())


class Whole:
    """The forward and backward pass of a model that is not cut into stages."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def step(self, text: torch.Tensor) -> torch.Tensor:
        """Compute the gradients of a batch, and return its loss."""
        with loss_parallel():
            loss = loss_of(self.model(text[:, :-1]), text[:, 1:])
            loss.backward()
        clip_gradients(self.model)
        return whole(loss)


class Staged:
    """The passes of one stage of a pipeline, for all microbatches of a batch."""

    def __init__(self, part: nn.Module, mesh: DeviceMesh, microbatches: int) -> None:
        self.part, self.group = part, mesh.get_group("pp")
        self.here, self.count = mesh.get_local_rank("pp"), mesh["pp"].size()
        stage = PipelineStage(part, self.here, self.count, torch.device("cpu"), group=self.group)
        self.schedule = Schedule1F1B(stage, microbatches, loss_fn=loss_of)

    def step(self, text: torch.Tensor) -> torch.Tensor:
        """Compute the gradients of a batch, and return its loss."""
        is_last = self.here == self.count - 1
        losses: list[torch.Tensor] = []
        with loss_parallel():
            self.schedule.step(
                *([text[:, :-1]] if self.here == 0 else []),
                target=text[:, 1:] if is_last else None,
                losses=losses,
                return_outputs=False,
            )
        clip_gradients(self.part, self.group)
        loss = torch.stack([whole(one) for one in losses]).mean() if is_last else torch.zeros(())
        dist.broadcast(loss, group_src=self.count - 1, group=self.group)
        return loss


def sha256(part: nn.Module, stages: dist.ProcessGroup) -> str:
    """Hash the whole weights of all stages; a collective."""
    digest = hashlib.sha256()
    for parameter in part.parameters():
        digest.update(whole(parameter).cpu().numpy().tobytes())
    digests = [b""] * dist.get_world_size(stages)
    dist.all_gather_object(digests, digest.digest(), group=stages)
    return hashlib.sha256(b"".join(digests)).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--dp-replicate", type=int, default=1, help="copies of the sharded model")
    parser.add_argument("--dp-shard", type=int, default=1, help="ranks that each copy is sharded over")
    parser.add_argument("--tp", type=int, default=1, help="ranks that share each matrix and each sequence")
    parser.add_argument("--pp", type=int, default=1, help="stages of the pipeline, one per rank")
    parser.add_argument("--microbatches", type=int, default=4, help="parts of a batch that pass a pipeline in turn")
    parser.add_argument("--mixed-precision-param", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=8, help="texts per data-parallel rank and step")
    parser.add_argument("--global-batch", type=int, help="texts per step of the whole job, for equal bits at any size")
    parser.add_argument("--length", type=int, default=64, help="bytes per text; a multiple of --tp")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--interval", type=int, default=20, help="steps between checkpoints")
    args = parser.parse_args()

    samebits.init()
    torch.manual_seed(1)
    sizes = (args.pp, args.dp_replicate, args.dp_shard, args.tp)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("pp", "dp_replicate", "dp_shard", "tp"))
    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, args.mixed_precision_param))
    with torch.device("meta"):  # no memory: elastic.run allocates each rank's part and calls init_weights()
        layers = [len(range(stage, args.layers, args.pp)) for stage in range(args.pp)]
        parts = nn.ModuleList(
            Transformer(args.dim, count, args.length, is_first=stage == 0, is_last=stage == args.pp - 1)
            for stage, count in enumerate(layers)
        )
    for part in parts:
        parallelize(part, mesh, policy)
    optimizer = torch.optim.AdamW(parts.parameters(), lr=3e-3, fused=True)
    texts = standard_library(args.length, samples=4096)
    sampler = samebits.ElasticSampler(texts, seed=1)
    loader = DataLoader(texts, args.batch_size, sampler=sampler, drop_last=True, generator=torch.Generator())
    checkpoint = samebits.CheckpointConfig(save_checkpoint_steps=args.interval)
    state = samebits.elastic.TorchState(
        *(parts if args.pp > 1 else parts[0], optimizer),
        pipeline=mesh["pp"] if args.pp > 1 else None,
        global_batch=args.global_batch,
        micro_batch=args.batch_size if args.global_batch else None,
        sampler=sampler,
        epoch=0,
        rng="per_step",
        checkpoint=checkpoint,
    )

    @samebits.elastic.run
    def train(state: samebits.elastic.TorchState) -> str:
        passes = Whole(parts[0]) if args.pp == 1 else Staged(parts[mesh.get_local_rank("pp")], mesh, args.microbatches)
        while state.completed_steps < args.steps:
            sampler.set_epoch(state.epoch)
            for batch, (text,) in enumerate(loader):
                optimizer.zero_grad()
                loss = passes.step(text)
                optimizer.step()
                sampler.record_batch(batch, args.batch_size)
                state.report(loss=loss, total_steps=args.steps)
                state.commit()
                if state.completed_steps == args.steps:
                    break
            else:
                state.epoch += 1
        return sha256(parts[mesh.get_local_rank("pp")], mesh.get_group("pp"))

    print(f"final step={args.steps} sha256={train(state)}", flush=True)


if __name__ == "__main__":
    main()
