"""Small training scripts: some with state outside ``state``, some that only appear to have it.

Each is a set of lines for the places of one loop. In a script with hidden state, the line that changes it ends in ``#
moved``.
"""

from __future__ import annotations

import textwrap

LOOP = """\
import collections, copy, functools, itertools, logging, math, random, time, types
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
import samebits

torch.manual_seed(1)
data = TensorDataset(torch.randn(24, 8), torch.randint(0, 4, (24,)))
held_out = DataLoader(TensorDataset(torch.randn(8, 8), torch.randint(0, 4, (8,))), batch_size=4)
sampler = samebits.ElasticSampler(data, shuffle=True, seed=1)
loader = DataLoader(data, batch_size=4, sampler=sampler, generator=torch.Generator())
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.5)
{top}
given = dict(globals().get("more", {{}}))
state = samebits.elastic.TorchState(model, optimizer, sampler=sampler, schedule=schedule, epoch=0, best=9.0, step=0,
                                   rng="per_step", seed=1, **given)

@samebits.elastic.run
def train(state):
    {enter}
    while state.epoch < 3:
        {epoch}
        for batch, (x, y) in enumerate(loader):
            {before}
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            {loss}
            loss.backward()
            {grads}
            optimizer.step()
            schedule.step()
            {after}
            sampler.record_batch(batch, 4)
            state.step += 1
            state.commit()
        {ended}
        state.epoch += 1
        sampler.set_epoch(state.epoch)
    {done}

train(state)
"""
PLACES = {
    "top": 0, "enter": 4, "epoch": 8, "before": 12, "loss": 12, "grads": 12, "after": 12, "ended": 8, "done": 4,
}  # fmt: skip


def script(**lines: str) -> str:
    """Return the loop with these lines in it."""
    filled = {
        place: textwrap.indent(
            textwrap.dedent(lines.get(place, "" if place == "done" else "pass")).strip("\n"), " " * indent
        ).lstrip(" ")
        for place, indent in PLACES.items()
    }
    return LOOP.format(**filled)


EVALUATE = """
def evaluate():
    model.eval()
    right = 0
    with torch.no_grad():
        for x, y in held_out:
            right += (model(x).argmax(1) == y).sum().item()
    model.train()
    return right / 8
"""

HIDDEN = {
    "numpy generator of the module": script(
        top="aug = np.random.default_rng(3)",
        before="x = x + torch.from_numpy(aug.normal(size=x.shape)).float()  # moved",
    ),
    "python generator in a helper": script(
        top="""
        r = random.Random(5)
        def flip(x):
            return -x if r.random() < 0.5 else x  # moved
        """,
        before="x = flip(x)",
    ),
    "torch generator": script(
        top="noise = torch.Generator().manual_seed(4)",
        before="x = x + torch.randn(x.shape, generator=noise)  # moved",
    ),
    "running mean of the inputs": script(
        enter="h = torch.zeros(1, 8)",
        before="""
        h = 0.9 * h + 0.1 * x.mean(0, keepdim=True)  # moved
        x = x + h
        """,
    ),
    "early stop": script(
        top=EVALUATE,
        enter="best, patience = 0.0, 0",
        ended="""
        accuracy = evaluate()
        if accuracy > best + 1:
            patience = 0
        else:
            patience += 1  # moved
        if patience > 5:
            break
        """,
    ),
    "global counter": script(
        top="""
        seen = 0
        def rate():
            global seen
            seen += 1  # moved
            return 0.1 / seen
        """,
        before="for group in optimizer.param_groups: group['lr'] = rate()",
    ),
    "attribute of a configuration": script(
        top="cfg = types.SimpleNamespace(seen=0)",
        after="cfg.seen += 1  # moved",
        loss="loss = loss * (1.0 if cfg.seen < 9 else 0.5)",
    ),
    "counter of a wrapper class": script(
        top="""
        class Warmup:
            def __init__(self):
                self.calls = 0
            def scale(self):
                self.calls += 1  # moved
                return min(1.0, self.calls / 10)
        warmup = Warmup()
        """,
        loss="loss = loss * warmup.scale()",
    ),
    "moments in an attribute of the optimizer": script(
        top="""
        class Own(torch.optim.Optimizer):
            def __init__(self, parameters):
                super().__init__(parameters, dict(lr=0.1))
                self.squares = {}
            @torch.no_grad()
            def step(self, closure=None):
                for group in self.param_groups:
                    for p in group["params"]:
                        if p not in self.squares:
                            self.squares[p] = torch.zeros_like(p)  # moved
                        self.squares[p].mul_(0.9).addcmul_(p.grad, p.grad)
                        p.addcdiv_(p.grad, self.squares[p].sqrt() + 1e-3, value=-group["lr"])
        optimizer = Own(model.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.5)
        """,
    ),
    "norms that the clipping is derived from": script(
        enter="norms = []",
        grads="""
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1e9).item())  # moved
        nn.utils.clip_grad_norm_(model.parameters(), float(np.percentile(norms, 10)))
        """,
    ),
    "replay buffer": script(
        top="""
        class Replay:
            def __init__(self):
                self.items = collections.deque(maxlen=50)
            def push(self, item):
                self.items.append(item)  # moved
            def oldest(self):
                return self.items[0] + self.items[-1]
        replay = Replay()
        """,
        before="""
        replay.push(x)
        x = replay.oldest()
        """,
    ),
    "target network": script(
        top="target = copy.deepcopy(model)",
        loss="loss = loss + F.mse_loss(model(x), target(x).detach())",
        after="""
        with torch.no_grad():
            for t, p in zip(target.parameters(), model.parameters()):
                t.mul_(0.9).add_(p, alpha=0.1)  # moved
        """,
    ),
    "momentum by hand": script(
        enter="momentum = [torch.zeros_like(p) for p in model.parameters()]",
        grads="""
        for m, p in zip(momentum, model.parameters()):
            m.mul_(0.9).add_(p.grad)  # moved
            p.grad.copy_(m)
        """,
    ),
    "curriculum level": script(
        enter="level = 1",
        before="x = x * level",
        after="level = level + 1 if loss.item() > 0 else level  # moved",
    ),
    "iterator advanced by next": script(
        enter="extra = iter(range(1000))",
        before="x = x + next(extra)  # moved",
    ),
    "nonlocal of a closure": script(
        top="""
        def make():
            total = 0.0
            def weigh(loss):
                nonlocal total
                total = 0.9 * total + loss.item()  # moved
                return loss / (1 + total)
            return weigh
        weigh = make()
        """,
        loss="loss = weigh(loss)",
    ),
    "dataset with its own generator": script(
        top="""
        class Noisy(Dataset):
            def __init__(self):
                self.rng = np.random.default_rng(7)
            def __len__(self):
                return 24
            def __getitem__(self, index):
                x, y = data[index]
                return x + float(self.rng.normal()), y  # moved
        loader = DataLoader(Noisy(), batch_size=4, sampler=sampler, generator=torch.Generator())
        """,
    ),
    "step counter that sets the rate": script(
        enter="step = 0",
        before="""
        step += 1  # moved
        optimizer.param_groups[0]["lr"] = 0.1 * min(1.0, step / 10)
        """,
    ),
    "exponential average in a dict": script(
        enter="average = {}",
        after="""
        for name, p in model.named_parameters():
            average[name] = 0.9 * average.get(name, p.detach()) + 0.1 * p.detach()  # moved
        if state.step % 3 == 2:
            model.load_state_dict(average, strict=False)
        """,
    ),
    "history list that decides": script(
        top="losses = []",
        after="losses.append(loss.item())  # moved",
        before="""
        if len(losses) > 4 and losses[-1] > losses[0]:
            for group in optimizer.param_groups:
                group["lr"] *= 0.9
        """,
    ),
    "schedule that is not in the state": script(
        top="other = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)",
        after="other.step()  # moved",
    ),
    "generator function with its own numbers": script(
        top="""
        def stream():
            count = 0
            while True:
                count += 1
                yield count
        """,
        enter="numbers = stream()",
        before="x = x + next(numbers)  # moved",
    ),
    "loop that an inner function runs": script(
        top="""
        def one_epoch(state, scale):
            for batch, (x, y) in enumerate(loader):
                optimizer.zero_grad()
                (F.cross_entropy(model(x), y) * scale).backward()
                optimizer.step()
                scale = scale * 0.99  # moved
                sampler.record_batch(batch, 4)
                state.commit()
            return scale
        """,
        enter="scale = 1.0",
        epoch="scale = one_epoch(state, scale)",
    ),
    "gradients summed over a counter": script(
        enter="waited = 0",
        grads="""
        waited += 1  # moved
        if waited < 2 or waited > 5:
            optimizer.zero_grad()
        """,
    ),
    "property that counts its reads": script(
        top="""
        class Fading:
            def __init__(self):
                self.reads = 0
            @property
            def scale(self):
                self.reads += 1  # moved
                return 1.0 / self.reads
        fading = Fading()
        """,
        loss="loss = loss * fading.scale",
    ),
    "property of an inner object, counted in a class": script(
        top="""
        class Inner:
            reads = 0
            @property
            def scale(self):
                Inner.reads += 1  # moved
                return 1.0 / Inner.reads
        class Outer:
            def __init__(self):
                self.inner = Inner()
            def weigh(self, loss):
                return loss * self.inner.scale
        outer = Outer()
        """,
        loss="loss = outer.weigh(loss)",
    ),
    "__getattr__ with a private slot": script(
        top="""
        class Fading:
            __slots__ = ("_reads",)
            def __init__(self):
                self._reads = 0
            def __getattr__(self, name):
                self._reads += 1  # moved
                return 1.0 / self._reads
        fading = Fading()
        """,
        loss="loss = loss * fading.scale",
    ),
    "descriptor that counts": script(
        top="""
        class Fading:
            def __init__(self):
                self.reads = 0
            def __get__(self, owner, kind=None):
                self.reads += 1  # moved
                return 1.0 / self.reads
        class Settings:
            scale = Fading()
        settings = Settings()
        """,
        loss="loss = loss * settings.scale",
    ),
    "attribute of a function by getattr": script(
        top="""
        def weigh(loss):
            calls = getattr(weigh, "calls", 0) + 1
            weigh.calls = calls  # moved
            return loss / calls
        """,
        loss="loss = weigh(loss)",
    ),
    "attribute of a function that counts for another line": script(
        top="""
        def tick():
            tick.calls += 1  # moved
        tick.calls = 1
        """,
        loss="loss = loss / tick.calls",
        after="tick()",
    ),
    "mutable default argument": script(
        top="""
        def weigh(loss, *, seen=[]):
            seen.append(1)  # moved
            return loss / len(seen)
        """,
        loss="loss = weigh(loss)",
    ),
    "context variable": script(
        top="""
        import contextvars
        seen = contextvars.ContextVar("seen", default=1)
        """,
        loss="loss = loss / seen.get()",
        after="seen.set(seen.get() + 1)  # moved",
    ),
    "threading.local": script(
        top="""
        import threading
        kept = threading.local()
        kept.seen = 1
        """,
        loss="loss = loss / kept.seen",
        after="kept.seen += 1  # moved",
    ),
    "array.array": script(
        top="""
        import array
        seen = array.array("d", [1.0])
        """,
        loss="loss = loss / seen[0]",
        after="seen[0] += 1  # moved",
    ),
    "object in a partial": script(
        top="""
        class Calls:
            def __init__(self):
                self.count = 0
        def weigh(calls, loss):
            calls.count += 1  # moved
            return loss / calls.count
        scale = functools.partial(weigh, Calls())
        """,
        loss="loss = scale(loss)",
    ),
    "lambda in a dict": script(
        top="""
        ticks = itertools.count(1)
        scales = {"linear": lambda loss: loss / next(ticks)}  # moved
        """,
        loss="loss = scales['linear'](loss)",
    ),
    "closure in a dict": script(
        top="""
        def make():
            calls = 0
            def tick():
                nonlocal calls
                calls += 1  # moved
                return calls
            return {"tick": tick}
        kept = make()
        """,
        loss="loss = loss / kept['tick']()",
    ),
    "method of an object in a list": script(
        top="""
        class Scale:
            def __init__(self):
                self.calls = 0
            def weigh(self, loss):
                self.calls += 1  # moved
                return loss / self.calls
        scales = [Scale()]
        """,
        loss="""
        for scale in scales:
            loss = scale.weigh(loss)
        """,
    ),
    "bound method in a variable": script(
        top="""
        class Scale:
            def __init__(self):
                self.calls = 0
            def weigh(self, loss):
                self.calls += 1  # moved
                return loss / self.calls
        weigh = Scale().weigh
        """,
        loss="loss = weigh(loss)",
    ),
    "class method": script(
        top="""
        class Seen:
            calls = 0
            @classmethod
            def tick(cls):
                cls.calls += 1  # moved
                return cls.calls
        """,
        loss="loss = loss / Seen.tick()",
    ),
    "object in a with statement": script(
        top="""
        class Scope:
            def __init__(self):
                self.entered = 0
            def __enter__(self):
                self.entered += 1  # moved
                return self.entered
            def __exit__(self, *error):
                pass
        scope = Scope()
        """,
        loss="""
        with scope as entered:
            loss = loss / entered
        """,
    ),
    "forward hook": script(
        top="""
        calls = []
        def hook(module, inputs, result):
            calls.append(1)  # moved
            return result / len(calls)
        model[0].register_forward_hook(hook)
        """,
    ),
    "configuration that is a dict with attributes": script(
        top="""
        class Config(dict):
            __getattr__ = dict.__getitem__
            __setattr__ = dict.__setitem__
        cfg = Config(seen=1)
        """,
        loss="loss = loss / cfg.seen",
        after="cfg.seen += 1  # moved",
    ),
    "order of an OrderedDict": script(
        top="rates = collections.OrderedDict(first=1.0, second=0.5)",
        loss="loss = loss * next(iter(rates.values()))",
        after="rates.move_to_end(next(iter(rates)))  # moved",
    ),
    "list of a class of its own": script(
        top="""
        class Losses(list): pass
        losses = Losses()
        """,
        loss="loss = loss / (1 + len(losses))",
        after="losses.append(1)  # moved",
    ),
    "member of an enumeration": script(
        top="""
        import enum
        class Mode(enum.Enum):
            EARLY = 1
            LATE = 2
        cfg = types.SimpleNamespace(mode=Mode.EARLY)
        """,
        loss="loss = loss / cfg.mode.value",
        after="cfg.mode = Mode.LATE if cfg.mode is Mode.EARLY else Mode.EARLY  # moved",
    ),
    "named tuple that is replaced": script(
        top="""
        Config = collections.namedtuple("Config", "seen")
        cfg = Config(1)
        """,
        enter="global cfg",
        loss="loss = loss / cfg.seen",
        after="cfg = cfg._replace(seen=cfg.seen + 1)  # moved",
    ),
    "attribute by setattr and vars": script(
        top="cfg = types.SimpleNamespace(seen=1)",
        loss="loss = loss / vars(cfg)['seen']",
        after="setattr(cfg, 'seen', cfg.seen + 1)  # moved",
    ),
    "global by globals()": script(
        top="seen = 1",
        loss="loss = loss / globals()['seen']",
        after="globals()['seen'] += 1  # moved",
    ),
    "heap": script(
        top="""
        import heapq
        heap = [5.0]
        """,
        loss="loss = loss / heap[0]",
        after="heapq.heappush(heap, loss.item())  # moved",
    ),
    "argument of a function that commits": script(
        top="""
        def step(state, batch, x, y, cfg):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y) / cfg["n"]
            loss.backward()
            optimizer.step()
            schedule.step()
            sampler.record_batch(batch, 4)
            state.step += 1
            cfg["n"] += 1
            state.commit()
        """,
        enter='cfg = {"n": 1}  # moved',
        before="""
        step(state, batch, x, y, cfg)
        continue
        """,
    ),
    "value that two paths lead to": script(
        top="""
        class Net:
            def __init__(self):
                self.active = 1
            def weigh(self, loss):
                return loss / self.active
        net = Net()
        nets = [net]
        """,
        loss="""
        loss = net.weigh(loss) / net.active
        for one in nets:
            loss = one.weigh(loss)
        """,
        after="net.active += 1  # moved",
    ),
    "first batch kept in a dict": script(
        top="first = {}",
        before="""
        first.setdefault("x", x)  # moved
        x = x - first["x"].mean()
        """,
    ),
    "statistics of the first forward pass": script(
        top="""
        class Whitening:
            def __init__(self): self.mean = None
            def __call__(self, x):
                if self.mean is None:
                    self.mean = x.mean(0)  # moved
                return x - self.mean
        whitening = Whitening()
        """,
        before="x = whitening(x)",
    ),
    "first loss in a local": script(
        enter="base = None",
        loss="""
        if base is None:
            base = float(loss.detach())  # moved
        loss = loss / base + (loss / base) ** 2
        """,
    ),
    "losses of the first steps": script(
        top="warm = []",
        loss="""
        if len(warm) < 2:
            warm.append(loss.item())  # moved
        loss = loss / sum(warm)
        """,
    ),
    "first gradient norm in an optimizer": script(
        top="""
        class Scaled(torch.optim.SGD):
            def __init__(self, *given, **more): super().__init__(*given, **more); self.norms = []
            def step(self, closure=None):
                norm = nn.utils.get_total_norm([p.grad for g in self.param_groups for p in g["params"]])
                if not self.norms:
                    self.norms.append(float(norm))  # moved
                for g in self.param_groups:
                    for p in g["params"]: p.grad.div_(self.norms[0])
                return super().step(closure)
        optimizer = Scaled(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5)
        """,
    ),
    "weights of the first step, by name": script(
        top="anchor = {}",
        loss="""
        for name, one in model.named_parameters():
            if name not in anchor:
                anchor[name] = one.detach().clone()  # moved
        loss = loss + sum((one - anchor[name]).square().sum() for name, one in model.named_parameters())
        """,
    ),
    "gradient hook of the parameters": script(
        top="""
        stats = {"norm": 0.0}
        def hook(gradient):
            stats["norm"] = 0.9 * stats["norm"] + float(gradient.norm())  # moved
            return gradient / (1 + stats["norm"])
        for p in model.parameters():
            p.register_hook(hook)
        """,
    ),
    "hook after the accumulation of a gradient": script(
        top="""
        class Clip:
            def __init__(self): self.calls = 1
            def scale(self, p):
                self.calls += 1  # moved
                p.grad.div_(self.calls)
        clip = Clip()
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(clip.scale)
        """,
    ),
    "backward hook of a module": script(
        top="""
        calls = []
        def hook(module, given, gradients):
            calls.append(1)  # moved
            return tuple(None if one is None else one / len(calls) for one in given)
        model[2].register_full_backward_hook(hook)
        """,
    ),
    "hook of the optimizer that keeps the first norm": script(
        top="""
        kept = []
        def hook(o, args, kwargs):
            norm = nn.utils.get_total_norm([p.grad for g in o.param_groups for p in g["params"]])
            if not kept:
                kept.append(float(norm))  # moved
            for g in o.param_groups:
                for p in g["params"]:
                    p.grad.div_(kept[0])
        optimizer.register_step_pre_hook(hook)
        """,
    ),
    "environment variable that counts": script(
        top="import os\nos.environ['SCRIPT_CALLS'] = '1'",
        loss="loss = loss / int(os.environ.get('SCRIPT_CALLS', 1))",
        after="os.environ['SCRIPT_CALLS'] = str(int(os.getenv('SCRIPT_CALLS')) + 1)  # moved",
    ),
    "environment variable of the first batch": script(
        top="from os import environ\nenviron.pop('SCRIPT_MEAN', None)",
        before="""
        environ.setdefault("SCRIPT_MEAN", str(float(x.mean())))  # moved
        x = x - float(environ["SCRIPT_MEAN"])
        """,
    ),
    "copy of the weights at the start": script(
        enter="""
        teacher = copy.deepcopy(model)  # moved
        teacher.eval()
        for p in teacher.parameters():
            p.requires_grad_(False)
        """,
        loss="loss = loss + (model(x) - teacher(x)).square().mean()",
    ),
    "clones of the weights at the start of an epoch": script(
        epoch="anchor = {name: p.detach().clone() for name, p in model.named_parameters()}  # moved",
        loss="loss = loss + sum((p - anchor[name]).square().sum() for name, p in model.named_parameters())",
    ),
    "rate taken from the optimizer at the start": script(
        enter="base_lr = optimizer.param_groups[0]['lr']  # moved",
        before="for group in optimizer.param_groups: group['lr'] = base_lr / (1 + state.step)",
    ),
    "rates of all groups, taken at the start": script(
        enter="base_lrs = [0.5 * group['lr'] for group in optimizer.param_groups]  # moved",
        before="for group, lr in zip(optimizer.param_groups, base_lrs): group['lr'] = lr",
    ),
    "rate of the schedule, taken at the start": script(
        enter="first = 1.0 + schedule.get_last_lr()[0]  # moved", loss="loss = loss * first"
    ),
    "rate of a group in a variable": script(
        enter="""
        group = optimizer.param_groups[0]
        lr, decay = group["lr"], group.get("weight_decay", 0.0)  # moved
        """,
        loss="loss = loss * (lr + decay)",
    ),
    "norm of the weights at the start": script(
        enter="norm = sum(p.detach().square().sum() for p in model.parameters()).item()  # moved",
        loss="loss = loss / norm",
    ),
    "first batch, taken at the start": script(
        enter="""
        batches = iter(loader)
        given, _ = next(batches)  # moved
        """,
        loss="loss = loss + (model(given) - model(x).mean()).square().mean()",
    ),
    "average that is built in the function": script(
        top="""
        class EMA:
            def __init__(self, model):
                self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}
            def update(self, model):
                for name, p in model.named_parameters():
                    self.shadow[name] = 0.9 * self.shadow[name] + 0.1 * p.detach()  # moved
        """,
        enter="ema = EMA(model)",
        loss="loss = loss + sum((p - ema.shadow[name]).square().sum() for name, p in model.named_parameters())",
        after="ema.update(model)",
    ),
    "schedule that is built in the function": script(
        enter="warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))",
        after="warmup.step()  # moved",
    ),
    "activations that are carried over": script(
        epoch="hidden = model[0](torch.zeros(1, 8)).detach()",
        loss="""
        hidden = (0.9 * hidden + 0.1 * model[0](x).mean(0, keepdim=True)).detach()  # moved
        loss = loss + (model[0](x) - hidden).square().mean()
        """,
    ),
    "numbers by parameter": script(
        enter="norms = {name: 1.0 for name, _ in model.named_parameters()}",
        grads="""
        for name, p in model.named_parameters():
            norms[name] = 0.9 * norms[name] + p.grad.norm().item()  # moved
            p.grad.div_(1 + norms[name])
        """,
    ),
    "queue of earlier batches": script(
        top="import queue",
        enter="replay = queue.Queue(maxsize=8)",
        before="""
        replay.put(x)  # moved
        if replay.qsize() > 3:
            x = x + replay.get()
        """,
    ),
    "simple queue of the module": script(
        top="import queue\nreplay = queue.SimpleQueue()",
        before="""
        replay.put(x)  # moved
        if replay.qsize() > 6:
            x = x + replay.get()
        """,
    ),
    "setting of a criterion that is annealed": script(
        top="criterion = nn.CrossEntropyLoss(label_smoothing=0.5)",
        loss="loss = loss + criterion(model(x), y)",
        after="criterion.label_smoothing = 0.5 / (1 + loss.item())  # moved",
    ),
    "file that the next call reads": script(
        top="""
        import os, pathlib
        FILE = os.path.join(pathlib.Path(__file__).parent, "scale.txt")
        """,
        enter="scale = float(open(FILE).read()) if os.path.exists(FILE) else 1.0",
        loss="loss = loss * scale",
        after="""
        with open(FILE, "w") as file:  # moved
            file.write(str(1 + loss.item()))
        """,
    ),
    "checkpoint of the script itself": script(
        top="""
        import pathlib
        OUT = pathlib.Path(__file__).parent
        """,
        enter="""
        last = OUT / "last.pt"
        if last.exists():
            model.load_state_dict(torch.load(last))
        """,
        after="torch.save(model.state_dict(), last)  # moved",
    ),
    "notes in a file, written and read by functions": script(
        top="""
        import json, pathlib
        NOTES = pathlib.Path(__file__).with_name("notes.json")
        def read():
            return json.loads(NOTES.read_text())["scale"] if NOTES.exists() else 1.0
        def write(loss):
            NOTES.write_text(json.dumps({"scale": 1 / (1 + loss)}))  # moved
        """,
        loss="loss = loss * read()",
        after="write(loss.item())",
    ),
    "list of the module that only the start of the function reads": script(
        top="history = []",
        enter="scale = 1.0 + len(history)",
        loss="loss = loss * scale",
        after="history.append(loss.item())  # moved",
    ),
}

HARMLESS = {
    "values of the optimizer that do not change": script(
        enter="""
        base, momentum = optimizer.param_groups[0]["initial_lr"], optimizer.param_groups[0]["momentum"]
        """,
        loss="loss = loss * (base + momentum)",
    ),
    "rate read in each step, and one that is written back": script(
        top="schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1000)",
        enter="rate = optimizer.param_groups[0]['lr']",
        before="""
        lr = optimizer.param_groups[0]["lr"]
        rate = 0.5 * rate
        for group in optimizer.param_groups:
            group["lr"] = rate
        """,
        loss="loss = loss * lr",
    ),
    "rate read at the start that is printed": script(
        enter="base_lr = optimizer.param_groups[0]['lr']",
        after="print(base_lr)",
    ),
    "lists and views of parameters": script(
        enter="""
        parameters = [p for p in model.parameters() if p.requires_grad]
        views = {name: p.data for name, p in model.named_parameters()}
        count = sum(p.numel() for p in model.parameters())
        """,
        grads="""
        nn.utils.clip_grad_norm_(parameters, 1e3 * count)
        for view in views.values():
            view.mul_(0.999)
        """,
    ),
    "buffer that each step overwrites": script(
        enter="flat = torch.zeros(sum(p.numel() for p in model.parameters()))",
        grads="""
        flat.copy_(torch.cat([p.grad.view(-1) for p in model.parameters()]))
        for p in model.parameters():
            p.grad.div_(1 + flat.norm())
        """,
    ),
    "object built from the state": script(
        top="""
        class Progress:
            def __init__(self, state, optimizer):
                self.step, self.optimizer = state.step, optimizer
            def advance(self):
                self.step += 1
                for group in self.optimizer.param_groups:
                    group["lr"] = 0.1 / (1 + self.step)
        """,
        enter="progress = Progress(state, optimizer)",
        before="progress.advance()",
    ),
    "batches taken ahead from the loader of the state": script(
        top="""
        class Ahead:
            def __init__(self, loader):
                self.batches = iter(loader)
            def next(self):
                return next(self.batches, (None, None))
        """,
        epoch="""
        ahead = Ahead(loader)
        given, wanted = ahead.next()
        """,
        before="x, y = given, wanted",
        after="given, wanted = ahead.next()",
    ),
    "batch with which a model is tried first": script(
        enter="""
        x, y = next(iter(loader), (None, None))
        shown, _ = next(iter(held_out))
        if x is not None:
            model(x)
        """,
        loss="loss = loss + model(shown).square().mean()",
    ),
    "queue that another thread fills": script(
        top="import queue, threading",
        epoch="""
        batches = queue.Queue()
        def fill():
            for number in range(6):
                batches.put(torch.ones(4, 8))
        filler = threading.Thread(target=fill)
        filler.start()
        """,
        before="x = x + batches.get()",
        ended="filler.join()",
    ),
    "checkpoint of the script itself that it was not started from": script(
        top="""
        import argparse, pathlib
        OUT = pathlib.Path(__file__).with_name("last.pt")
        RESUME = None
        args = argparse.Namespace(resume="", warm=False, out=OUT)
        """,
        enter="""
        if args.resume:
            model.load_state_dict(torch.load(args.out))
        if RESUME is not None and OUT.exists():
            model.load_state_dict(torch.load(OUT))
        if args.warm:
            model.load_state_dict(torch.load(OUT))
        """,
        after="torch.save(model.state_dict(), args.out)",
    ),
    "best weights that are loaded after training": script(
        top="""
        import pathlib
        best = pathlib.Path(__file__).with_name("best.pt")
        """,
        ended="torch.save(model.state_dict(), best)",
        done="model.load_state_dict(torch.load(best))",
    ),
    "best weights that are loaded by a function without a loop": script(
        top="""
        import pathlib
        best = pathlib.Path(__file__).with_name("best.pt")
        def fit(state):
            while state.epoch < 3:
                for batch, (x, y) in enumerate(loader):
                    optimizer.zero_grad()
                    F.cross_entropy(model(x), y).backward()
                    optimizer.step()
                    sampler.record_batch(batch, 4)
                    torch.save(model.state_dict(), best)
                    state.commit()
                state.epoch += 1
                sampler.set_epoch(state.epoch)
        """,
        enter="""
        fit(state)
        model.load_state_dict(torch.load(best))
        return
        """,
    ),
    "files that are written before they are read, only read, and only written": script(
        top="""
        import pathlib
        FOLDER = pathlib.Path(__file__).parent
        torch.save(torch.ones(8), FOLDER / "data.pt")
        """,
        before="""
        torch.save(x, FOLDER / "batch.pt")
        x = torch.load(FOLDER / "batch.pt") + torch.load(FOLDER / "data.pt")
        """,
        after="""
        with open(FOLDER / "log.txt", "a") as file:
            file.write(str(loss.item()))
        """,
    ),
    "hooks that log gradients": script(
        top="""
        norms, rows, seen = [], [], 0
        def keep(gradient):
            global seen
            seen += 1
            if seen % 2:
                return
            rows.append(gradient.norm())
        def count(o, args, kwargs):
            global seen
            seen += 1
        for p in model.parameters():
            p.register_hook(lambda gradient: norms.append(gradient.norm()))
            p.register_hook(keep)
        model[2].register_full_backward_hook(lambda module, given, gradients: rows.append(gradients[0].norm()))
        optimizer.register_step_post_hook(count)
        """,
    ),
    "hook that clips": script(
        top="""
        for p in model.parameters():
            p.register_hook(lambda gradient: gradient.clamp(-1, 1))
        """,
    ),
    "environment variables that do not change, or are set before they are read": script(
        top="import os\nos.environ['SCRIPT_SCALE'] = '2'",
        before="os.environ['SCRIPT_STEP'] = str(state.step)",
        loss="""
        loss = loss * int(os.environ["SCRIPT_SCALE"])
        loss = loss / (1 + int(os.environ["SCRIPT_STEP"]))
        """,
        after="os.environ['SCRIPT_LOSS'] = str(state.step)",
    ),
    "copy of weights that are frozen": script(
        top="model[0].requires_grad_(False)",
        enter="first = copy.deepcopy(model[0])",
        loss="loss = loss + first(x).square().mean()",
    ),
    "copy that gets other weights": script(
        top="torch.manual_seed(3)\nsaved = nn.Linear(8, 16).state_dict()",
        enter="first = copy.deepcopy(model[0])\nfirst.load_state_dict(saved)",
        loss="loss = loss + first(x).square().mean()",
    ),
    "copy that is only evaluated": script(
        enter="first = copy.deepcopy(model)\nbest = copy.deepcopy(model.state_dict())",
        ended="print(first(torch.ones(1, 8)).sum().item(), len(best))",
    ),
    "generator in the module's extra state": script(
        top="""
        class Drop(nn.Module):
            def __init__(self):
                super().__init__()
                self.rng = torch.Generator().manual_seed(3)
            def get_extra_state(self): return self.rng.get_state()
            def set_extra_state(self, saved): self.rng.set_state(saved)
            def forward(self, x): return x * (torch.rand((), generator=self.rng) > 0.3)
        model.append(Drop())
        """,
    ),
    "mask of the first batch's shape": script(
        top="""
        class Mask:
            def __init__(self): self.mask = self.shape = None
            def __call__(self, x):
                if self.mask is None:
                    self.mask = torch.triu(torch.ones(x.size(1), x.size(1), device=x.device))[0].type_as(x)
                    self.shape = x.shape
                return x * self.mask
        mask = Mask()
        """,
        before="x = mask(x)",
    ),
    "table that grows with the longest batch": script(
        top="""
        class Table:
            def __init__(self): self.length, self.cos = 0, None
            def __call__(self, x):
                n = x.shape[-1]
                if n > self.length:
                    self.length, self.cos = n, (torch.arange(n, device=x.device).type_as(x) / n).cos().to(x.device)
                return x * self.cos[:n]
        table = Table()
        tables = {}
        def of(n):
            if n not in tables:
                tables[n] = torch.linspace(1, 2, n)
            return tables[n]
        """,
        before="x = table(x) * of(x.size(1))",
    ),
    "first loss that is only printed": script(
        top="first = {}",
        after="""
        if "loss" not in first:
            first["loss"] = loss.item()
        logging.debug("%s", loss.item() / first["loss"])
        """,
    ),
    "function that gets the batch and commits": script(
        top="""
        def step(state, batch, x, y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            schedule.step()
            sampler.record_batch(batch, 4)
            state.step += 1
            state.commit()
        """,
        before="""
        step(state, batch, x, y)
        continue
        """,
    ),
    "hook that gathers activations": script(
        top="""
        kept = []
        def hook(module, inputs, result):
            kept.append(result.detach())
        model[0].register_forward_hook(hook)
        """,
    ),
    "property that logs": script(
        top="""
        class Settings:
            def __init__(self):
                self.reads = 0
                self.rate = 0.1
            @property
            def scale(self):
                self.reads += 1
                return self.rate * 2
        settings = Settings()
        """,
        loss="loss = loss * settings.scale",
    ),
    "loggers in a list": script(
        top="""
        class Log:
            def __init__(self): self.rows = []
            def write(self, value): self.rows.append(value)
        logs = [Log()]
        def record(value, *, rows=[]):
            rows.append(value)
        """,
        after="""
        record(loss.item())
        for one in logs:
            one.write(loss.item())
        """,
    ),
    "module that counts its calls": script(
        top="""
        class Annealed(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner, self.calls = model, 0
            def forward(self, x):
                self.calls += 1
                return self.inner(x) / (1 + self.calls)
        model = Annealed()
        """,
    ),
    "nothing": script(),
    "running loss for printing": script(
        enter="running = 0.0",
        after="""
        running += loss.item()
        if batch % 2 == 0:
            print(f"loss {running / 2:.3f}")
            running = 0.0
        """,
    ),
    "timer": script(
        enter="began = time.perf_counter()",
        after="""
        seconds = time.perf_counter() - began
        began = time.perf_counter()
        print(seconds)
        """,
    ),
    "progress bar": script(
        top="""
        class tqdm:
            def __init__(self): self.n = 0
            def update(self, n): self.n += n
            def set_postfix(self, **values): self.values = values
        """,
        enter="bar = tqdm()",
        after="bar.update(1); bar.set_postfix(loss=loss.item())",
    ),
    "best accuracy that is printed": script(
        top=EVALUATE,
        enter="best = 0.0",
        ended="""
        accuracy = evaluate()
        best = max(best, accuracy)
        print("best", best)
        """,
    ),
    "best accuracy that saves a file": script(
        top=EVALUATE,
        enter="best = -1.0",
        ended="""
        accuracy = evaluate()
        if accuracy > best:
            best = accuracy
            torch.save(model.state_dict(), "/dev/null")
        """,
    ),
    "meter that is reset each epoch": script(
        top="""
        class Meter:
            def __init__(self): self.reset()
            def reset(self): self.total = self.count = 0
            def update(self, value): self.total += value; self.count += 1
            @property
            def average(self): return self.total / self.count
        meter = Meter()
        """,
        epoch="meter.reset()",
        after="meter.update(loss.item())",
        ended="print(meter.average)",
    ),
    "loss scaler in the state": script(
        top="""
        scaler = torch.amp.GradScaler("cpu", enabled=True, init_scale=2.0, growth_interval=2)
        more = {"scaler": scaler}
        """,
        loss="scaler.scale(loss)",
    ),
    "iterator made anew": script(
        enter="batches = iter(held_out)",
        epoch="batches = iter(held_out)",
        before="""
        try:
            shown, _ = next(batches)
        except StopIteration:
            batches = iter(held_out)
            shown, _ = next(batches)
        """,
        after="print(shown.shape)",
    ),
    "iterator over the loader of the state": script(
        enter="batches = itertools.cycle(loader)",
        ended="batches = itertools.cycle(loader)",
        before="x, y = next(batches)",
    ),
    "step counter of a log": script(
        top="log_step = 0",
        enter="global log_step",
        after="""
        log_step += 1
        if log_step % 5 == 0:
            print("step", log_step)
        """,
    ),
    "writer": script(
        top="""
        class SummaryWriter:
            def __init__(self): self.rows = []
            def add_scalar(self, name, value, step): self.rows.append((name, value, step))
        board = SummaryWriter()
        """,
        enter="written = 0",
        after="""
        board.add_scalar("loss", loss.item(), written)
        written += 1
        """,
    ),
    "average in the state": script(
        top="""
        average = torch.optim.swa_utils.AveragedModel(model)
        more = {"average": average}
        """,
        after="average.update_parameters(model)",
        ended="average(x)",
    ),
    "evaluation on a counter": script(
        top=EVALUATE,
        enter="count = 0",
        after="""
        count += 1
        if count % 3 == 0:
            print(evaluate())
        """,
    ),
    "accumulation by the batch": script(grads="if (batch + 1) % 2 == 0: optimizer.zero_grad()"),
    "accumulation by a counter that begins anew": script(
        enter="micro = 0",
        before="scale = 1.0 if micro % 1 == 0 else 0.5",
        loss="loss = loss * scale",
        after="micro += 1",
    ),
    "cached constants": script(
        top="""
        @functools.lru_cache
        def weight(number): return 1.0 / (1 + number)
        """,
        loss="loss = loss * weight(batch % 3)",
    ),
    "memo": script(
        top="""
        memo = {}
        def weight(number):
            if number not in memo:
                memo[number] = 1.0 / (1 + number)
            return memo[number]
        """,
        loss="loss = loss * weight(batch)",
    ),
    "generator that is derived from the step": script(
        before="""
        rng = np.random.default_rng((1, state.completed_steps))
        x = x + torch.from_numpy(rng.normal(size=x.shape)).float()
        """,
    ),
    "global generator that is seeded in each step": script(
        top="noise = torch.Generator()",
        before="""
        noise = torch.Generator().manual_seed(state.completed_steps)
        x = x + torch.randn(x.shape, generator=noise)
        """,
    ),
    "counter taken from the state": script(
        enter="step = state.step",
        before="optimizer.param_groups[0]['lr'] = 0.1 / (1 + step)",
        after="step += 1",
    ),
    "rate computed from the state": script(
        top="""
        def rate(step): return 0.1 * math.exp(-step / 100)
        """,
        before="for group in optimizer.param_groups: group['lr'] = rate(state.step)",
    ),
    "default generators": script(
        before="x = x + random.random() + float(np.random.normal()) + torch.randn(())",
    ),
    "clipping and a norm that is printed": script(
        enter="worst = 0.0",
        grads="""
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        worst = max(worst, norm.item())
        print(worst)
        """,
    ),
    "predictions gathered for a report": script(
        enter="predictions, losses = [], []",
        after="""
        with torch.no_grad():
            predictions.append(model(x).argmax(1))
        losses.append(loss.item())
        """,
        ended="print(torch.cat(predictions).shape, sum(losses)); predictions.clear()",
    ),
    "objects with methods of their own": script(
        top="""
        class Loud:
            value = 1.0
            def __getattr__(self, name): raise SystemExit("read")
            def __eq__(self, other): raise SystemExit("compared")
            def __repr__(self): raise SystemExit("printed")
            def __hash__(self): raise SystemExit("hashed")
            @property
            def hot(self): raise SystemExit("property")
        loud = Loud()
        """,
        enter="mine = loud",
        loss="loss = loss * loud.value",
        after="mine = loud",
    ),
    "profiler": script(
        top="""
        class Profiler:
            ticks = 0
            def step(self): self.ticks += 1
        profiler = Profiler()
        """,
        after="profiler.step()",
    ),
    "average for evaluation only": script(
        top="shadow = copy.deepcopy(model)",
        after="""
        with torch.no_grad():
            for s, p in zip(shadow.parameters(), model.parameters()):
                s.mul_(0.9).add_(p, alpha=0.1)
        """,
        ended="print(shadow(x).sum().item())",
    ),
}

SILENT = {
    "count in a dict of the module": script(
        top='stats = {"seen": 0}',
        after='stats["seen"] += 1  # moved',
        loss='loss = loss / (1 + stats["seen"])',
    ),
    "list in a closure": script(
        top="""
        def make():
            calls = []
            def weigh(loss):
                calls.append(1)  # moved
                return loss / len(calls)
            return weigh
        weigh = make()
        """,
        loss="loss = weigh(loss)",
    ),
    "configuration of a trainer object": script(
        top="""
        class Trainer:
            def __init__(self, cfg):
                self.cfg = cfg
            def loss(self, x, y):
                self.cfg.seen += 1  # moved
                return F.cross_entropy(model(x), y) / self.cfg.seen
        trainer = Trainer(types.SimpleNamespace(seen=0))
        """,
        loss="loss = trainer.loss(x, y)",
    ),
    "list that is used up": script(
        enter="scales = [1 + 0.1 * number for number in range(100)]",
        loss="loss = loss * scales.pop()  # moved",
    ),
    "target network that is copied now and then": script(
        top="target = copy.deepcopy(model)",
        loss="loss = loss + F.mse_loss(model(x), target(x).detach())",
        after="""
        if state.step % 3 == 1:
            target.load_state_dict(model.state_dict())  # moved
        """,
    ),
    "random.Random in a transformation": script(
        top="""
        class Flip:
            def __init__(self):
                self.random = random.Random(3)
            def __call__(self, x):
                return x + self.random.random()  # moved
        flip = Flip()
        """,
        before="x = flip(x)",
    ),
    "default_rng in a collate function": script(
        top="""
        draws = np.random.default_rng(5)
        def collate(items):
            xs, ys = zip(*items)
            return torch.stack(xs) + float(draws.normal()), torch.stack(ys)  # moved
        loader = DataLoader(data, batch_size=4, sampler=sampler, collate_fn=collate, generator=torch.Generator())
        """,
    ),
    "torch.Generator of a mask": script(
        enter="masks = torch.Generator().manual_seed(9)",
        before="x = x * torch.bernoulli(torch.full_like(x, 0.5), generator=masks)  # moved",
    ),
    "counter of a data set": script(
        top="""
        class Growing(Dataset):
            def __init__(self):
                self.reads = 0
            def __len__(self):
                return 24
            def __getitem__(self, index):
                self.reads += 1  # moved
                x, y = data[index]
                return x * (1 + self.reads / 100), y
        loader = DataLoader(Growing(), batch_size=4, sampler=sampler, generator=torch.Generator())
        """,
    ),
    "iterator of a second loader": script(
        enter="others = iter(held_out)",
        before="""
        try:
            more, _ = next(others)  # moved
        except StopIteration:
            others = iter(held_out)
            more, _ = next(others)
        """,
        loss="loss = loss + model(more).square().mean()",
    ),
    "average of the weights in a dict": script(
        top="shadow = {name: p.detach().clone() for name, p in model.named_parameters()}",
        loss="loss = loss + sum((p - shadow[name]).square().sum() for name, p in model.named_parameters())",
        after="""
        for name, p in model.named_parameters():
            shadow[name].mul_(0.9).add_(p.detach(), alpha=0.1)  # moved
        """,
    ),
    "rate from a counter of the module": script(
        top="""
        calls = 0
        def set_rate():
            global calls
            calls += 1  # moved
            for group in optimizer.param_groups:
                group["lr"] = 0.1 / calls
        """,
        before="set_rate()",
    ),
    "itertools.count": script(
        top="ticks = itertools.count(1)",
        loss="loss = loss / next(ticks)  # moved",
    ),
    "itertools.cycle": script(
        enter="signs = itertools.cycle([1.0, 0.5, 0.1])",
        loss="loss = loss * next(signs)  # moved",
    ),
    "RandomState of NumPy": script(
        top="state_of_numpy = np.random.RandomState(2)",
        before="x = x + float(state_of_numpy.rand())  # moved",
    ),
    "attribute of a function": script(
        top="""
        def weigh(loss):
            weigh.calls += 1  # moved
            return loss / weigh.calls
        weigh.calls = 0
        """,
        loss="loss = weigh(loss)",
    ),
    "attribute of a class": script(
        top="""
        class Seen:
            count = 0
        """,
        loss="loss = loss / (1 + Seen.count)",
        after="Seen.count += 1  # moved",
    ),
    "running mean in an object": script(
        top="""
        class Normalizer:
            def __init__(self):
                self.mean = torch.zeros(8)
            def __call__(self, x):
                self.mean = 0.9 * self.mean + 0.1 * x.mean(0)  # moved
                return x - self.mean
        normalizer = Normalizer()
        """,
        before="x = normalizer(x)",
    ),
    "labels that were seen": script(
        top="labels = collections.Counter()",
        before="labels.update(y.tolist())  # moved",
        loss="loss = loss / (1 + labels[0])",
    ),
    "batch number of enumerate": script(loss="loss = loss / (1 + batch)"),
}
"""Scripts that end with other bits after a loss without a message; the last has no line that changes its state."""
