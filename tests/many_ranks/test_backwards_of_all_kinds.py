"""Every way in which a loop may run backward passes: each scenario is written once, and run by the engine on all ranks
and by plain torch, which sees the ranks one after another.
"""

import contextlib
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from support.models import numbers
from support.oracle import largest_difference
from support.ranks import run_ranks
from support.training import config, group, place

STAGES = (0, 1, 2, 3)
STEPS = 3
WIDTH = 5


class Layer(nn.Module):
    """A block with a child and a parameter of its own, which it uses twice."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.full((WIDTH,), 0.9))

    def forward(self, x):
        return torch.tanh(self.linear(x) * self.gain) + 0.1 * self.gain


class Net(nn.Module):
    """Blocks between an entry and two heads; what runs is up to the call.

    x[n, 3] -> the loss against y[n, 1], or what the keywords ask for.
    """

    def __init__(self, blocks=3, around=None, reentrant=False):
        super().__init__()
        self.enter = nn.Linear(3, WIDTH)
        self.blocks = nn.ModuleList(Layer() for _ in range(blocks))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 1) for _ in range(2))
        self.around = around
        self.reentrant = reentrant

    def again(self, function, *args):
        return checkpoint(function, *args, use_reentrant=self.reentrant)

    def run(self, x, order):
        for index in order:
            x = self.again(self.blocks[index], x) if self.around == "block" else self.blocks[index](x)
        return x

    def hidden(self, x, order, start):
        order = range(len(self.blocks)) if order is None else order
        x = self.enter(x) if start is None else start
        if self.around == "segment":
            x = self.again(self.run, x, order[:2])
            return self.again(self.run, x, order[2:])
        return self.run(x, order)

    def forward(self, x, y=None, order=None, head=0, two=False, start=None):
        h = self.hidden(x, order, start)
        if y is None:
            return h
        loss = F.mse_loss(self.heads[head](h), y)
        return (loss, (h**2).mean()) if two else loss


class Plain:
    """Looks like an engine to a scenario; gradients add up in `p.grad`."""

    def __init__(self, module):
        self.module = module
        self.window = 0

    def __call__(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def backward(self, loss, retain_graph=False):
        loss.backward(retain_graph=retain_graph)
        return loss

    def step(self):
        self.window += 1

    def no_sync(self):
        return contextlib.nullcontext()

    def set_gradient_accumulation_boundary(self, boundary):
        pass

    def eval(self):
        self.module.eval()

    def train(self):
        self.module.train()


def part_of(rank, step, samples=2):
    """A batch of one rank in one step."""
    return numbers(samples, 3, seed=100 * rank + step)


# --- the scenarios: scenario(engine, rank, step) runs one optimizer step --------------------------------------------


def several_backwards(engine, rank, step):
    for turn in range(3):
        engine.backward(engine(*part_of(rank, step + 10 * turn)))
    engine.step()


def the_same_graph_twice(engine, rank, step):
    loss = engine(*part_of(rank, step))
    engine.backward(loss, retain_graph=True)
    engine.backward(loss)
    engine.step()


def two_losses_of_one_forward(engine, rank, step):
    first, second = engine(*part_of(rank, step), two=True)
    engine.backward(first, retain_graph=True)
    engine.backward(second)
    engine.step()


def two_losses_at_once(engine, rank, step):
    first, second = engine(*part_of(rank, step), two=True)
    torch.autograd.backward([first, second], [torch.tensor(1.0), torch.tensor(0.5)])
    engine.step()


def a_given_gradient(engine, rank, step):
    h = engine(part_of(rank, step)[0])
    h.backward(torch.linspace(-1, 1, h.numel()).view_as(h))
    engine.step()


def a_loss_outside_the_model(engine, rank, step):
    x, y = part_of(rank, step)
    F.mse_loss(engine(x).sum(dim=1, keepdim=True), y).backward()
    engine.step()


def several_forwards_one_backward(engine, rank, step):
    losses = [engine(*part_of(rank, step + 10 * turn)) for turn in range(3)]
    engine.backward(sum(losses) / 3)
    engine.step()


def old_graph_after_another_forward(engine, rank, step):
    first = engine(*part_of(rank, step))
    second = engine(*part_of(rank, step + 10))
    engine.backward(first)
    engine.backward(second)
    engine.step()


def old_graphs_of_blocks_called_twice(engine, rank, step):
    first = engine(*part_of(rank, step), order=[0, 0, 1, 1])
    second = engine(*part_of(rank, step + 10), order=[1, 1, 2, 2])
    engine.backward(first)
    engine.backward(second)
    engine.step()


def blocks_called_twice_on_what_needs_no_gradient(engine, rank, step):
    """The first call's input has no graph, the second call's is the first one's output."""
    hidden = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH) * (1 + rank)
    loss = engine(part_of(rank, step)[0], start=hidden, order=[0, 0, 1, 1]).square().mean()
    engine.backward(loss)
    engine.step()


def new_graph_first(engine, rank, step):
    first = engine(*part_of(rank, step))
    second = engine(*part_of(rank, step + 10))
    engine.backward(second)
    third = engine(*part_of(rank, step + 20))
    engine.backward(first)
    engine.backward(third)
    engine.step()


def forward_without_backward(engine, rank, step):
    engine(*part_of(rank, step + 50))
    kept = engine(*part_of(rank, step + 60))
    engine.backward(engine(*part_of(rank, step)))
    del kept
    engine.step()


def evaluate_before_between_and_after(engine, rank, step):
    def evaluate():
        engine.eval()
        with torch.no_grad():
            engine(*part_of(rank, step + 70))
        engine.train()

    evaluate()
    loss = engine(*part_of(rank, step))
    evaluate()
    engine.backward(loss)
    evaluate()
    engine.step()
    evaluate()


def a_graph_kept_over_evaluation_with_gradients(engine, rank, step):
    engine.eval()
    engine(*part_of(rank, step + 70))
    engine.train()
    engine.backward(engine(*part_of(rank, step)))
    engine.step()


def no_sync_then_sync(engine, rank, step):
    with engine.no_sync():
        engine.backward(engine(*part_of(rank, step)))
        engine.backward(engine(*part_of(rank, step + 10)))
    engine.backward(engine(*part_of(rank, step + 20)))
    engine.step()


def sync_then_no_sync(engine, rank, step):
    engine.backward(engine(*part_of(rank, step)))
    with engine.no_sync():
        engine.backward(engine(*part_of(rank, step + 10)))
    engine.step()


def no_sync_only(engine, rank, step):
    with engine.no_sync():
        engine.backward(engine(*part_of(rank, step)))
        engine.step()


def no_sync_in_pieces(engine, rank, step):
    for turn in range(4):
        with engine.no_sync() if turn in (0, 2) else contextlib.nullcontext():
            engine.backward(engine(*part_of(rank, step + 10 * turn)))
    engine.step()


def forced_boundaries(engine, rank, step):
    """As many micro-batches as the step's number says, whatever the configuration's accumulation is."""
    for turn in range(step + 1):
        engine.set_gradient_accumulation_boundary(turn == step)
        engine.backward(engine(*part_of(rank, step + 10 * turn)))
        engine.step()


def forced_boundaries_and_no_sync(engine, rank, step):
    for turn in range(3):
        last = turn == 2
        engine.set_gradient_accumulation_boundary(last)
        with contextlib.nullcontext() if last else engine.no_sync():
            engine.backward(engine(*part_of(rank, step + 10 * turn)))
        engine.step()


def blocks_called_several_times(engine, rank, step):
    engine.backward(engine(*part_of(rank, step), order=[0, 0, 1, 0, 1, 2, 2, 0]))
    engine.step()


def other_blocks_in_every_step(engine, rank, step):
    engine.backward(engine(*part_of(rank, step), order=[[0, 1], [2], [2, 1, 0]][step % 3]))
    engine.step()


def other_blocks_in_every_backward(engine, rank, step):
    for order in ([0, 1], [1, 2], [2]):
        engine.backward(engine(*part_of(rank, step), order=order))
    engine.step()


def other_heads_by_step(engine, rank, step):
    engine.backward(engine(*part_of(rank, step), head=step % 2))
    engine.step()


def other_heads_by_rank(engine, rank, step):
    engine.backward(engine(*part_of(rank, step), head=(rank + step) % 2))
    engine.step()


def no_loss_of_the_blocks(engine, rank, step):
    """The last blocks run, but what they give is not used."""
    hidden = engine(part_of(rank, step)[0], order=[0])
    engine(part_of(rank, step)[0], order=[0, 1, 2])
    hidden.square().mean().backward()
    engine.step()


def gradient_of_the_input(engine, rank, step):
    """The input's gradient is asked for first; the weights' come after."""
    x, y = part_of(rank, step)
    x.requires_grad_()
    loss = engine(x, y)
    (slope,) = torch.autograd.grad(loss, x, retain_graph=True)
    engine.backward(loss * slope.detach().norm())
    engine.step()


SCENARIOS = (
    several_backwards,
    the_same_graph_twice,
    two_losses_of_one_forward,
    two_losses_at_once,
    a_given_gradient,
    a_loss_outside_the_model,
    several_forwards_one_backward,
    old_graph_after_another_forward,
    old_graphs_of_blocks_called_twice,
    blocks_called_twice_on_what_needs_no_gradient,
    new_graph_first,
    forward_without_backward,
    evaluate_before_between_and_after,
    a_graph_kept_over_evaluation_with_gradients,
    no_sync_then_sync,
    sync_then_no_sync,
    no_sync_only,
    no_sync_in_pieces,
    forced_boundaries,
    forced_boundaries_and_no_sync,
    blocks_called_several_times,
    other_blocks_in_every_step,
    other_blocks_in_every_backward,
    other_heads_by_step,
    other_heads_by_rank,
    no_loss_of_the_blocks,
    gradient_of_the_input,
)
BY_NAME = {scenario.__name__: scenario for scenario in SCENARIOS}
FORCED = ("forced_boundaries", "forced_boundaries_and_no_sync")


def start(model, stage, **more):
    import shardledger as sl

    return sl.initialize(model=model, config=config(stage, lr=0.05, **more))[0]


def net(around=None, reentrant=False):
    torch.manual_seed(0)
    return Net(around=around, reentrant=reentrant)


def play(names, around=None, reentrant=False):
    """Scenarios one after another, each at every stage; weights by scenario and stage."""
    found = {}
    rank, _ = place()
    with group(30):
        for name, stage in itertools.product(names, STAGES):
            engine = start(net(around, reentrant), stage, accumulation=2 if name in FORCED else 1)
            try:
                for step in range(STEPS):
                    BY_NAME[name](engine, rank, step)
                    assert engine.global_steps == step + 1
                found[name, stage] = engine.state_dict()
            except Exception as error:
                raise AssertionError(f"{name}, stage {stage}, step {step}") from error
            engine.destroy()
    return found


def play_plainly(name, world):
    """The same scenario without engine or checkpoints: gradients added over ranks, divided once."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=True)
        for rank in range(world):
            engine = Plain(model)
            BY_NAME[name](engine, rank, step)
        for p in model.parameters():
            if p.grad is not None:
                p.grad /= world * engine.window
        optimizer.step()
    return model.state_dict()


def check(found, world):
    right = {name: play_plainly(name, world) for name, _ in found}
    gaps = {key: largest_difference(weights, right[key[0]]) for key, weights in found.items()}
    assert {key: gap for key, gap in gaps.items() if not gap <= 1e-6} == {}, f"world {world}"


def parts_of(names, count):
    """The scenarios in so many parts: one run of the ranks each."""
    names = list(names)
    return [names[start::count] for start in range(count)]


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("names", parts_of(BY_NAME, 3), ids=["a", "b", "c"])
def test_a_loop_of_any_kind_equals_plain_torch(names, world):
    check(run_ranks(play, world, names, timeout=120)[0], world)


@pytest.mark.parametrize("part", range(3))
@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
@pytest.mark.parametrize("around", ["block", "segment"])
def test_a_loop_of_any_kind_may_recompute_activations(around, reentrant, part):
    # torch's reentrant checkpoints refuse autograd.grad, and give no gradients when their input needs none.
    beyond = {"gradient_of_the_input", "blocks_called_twice_on_what_needs_no_gradient"} if reentrant else set()
    names = [name for name in parts_of(BY_NAME, 3)[part] if name not in FORCED and name not in beyond]
    check(run_ranks(play, 2, names, around, reentrant, timeout=120)[0], 2)


# --- what units take and give ---------------------------------------------------------------------------------------


class Odd(nn.Module):
    """A block whose forward does what `kind` says."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.spare = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, scale=None, skip=False):
        if skip:
            return x
        if self.kind == "returns a dict":
            return {"x": torch.tanh(self.linear(x)), "aux": [(x**2).mean()]}
        if self.kind == "returns a tuple":
            return torch.tanh(self.linear(x)), self.spare(x)
        if self.kind == "keyword tensors":
            return torch.tanh(self.linear(x) * scale)
        if self.kind == "checkpoint inside":
            return checkpoint(self.linear, x, use_reentrant=False).tanh()
        if self.kind == "reentrant checkpoint inside":
            return checkpoint(self.linear, x, use_reentrant=True).tanh()
        if self.kind == "in place":
            return self.linear(x.tanh_())
        if self.kind == "view":
            return torch.tanh(self.linear(x)).view(-1).view(x.shape)
        return torch.tanh(self.linear(x))


class OddNet(nn.Module):
    """Odd blocks; x[n, 3], y[n, 1] -> loss."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.enter = nn.Linear(3, WIDTH)
        self.layers = nn.ModuleList(Odd(kind) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.leave = nn.Linear(WIDTH, 1)

    def forward(self, x, y, step):
        x = first = self.enter(x)
        extra = 0.0
        for index, layer in enumerate(self.layers):
            if self.kind == "returns a dict":
                out = layer(x)
                x, extra = out["x"], extra + out["aux"][0]
            elif self.kind == "returns a tuple":
                x, aux = layer(x)
                extra = extra + (aux.mean() if index == step % 3 else 0.0)
            elif self.kind == "keyword tensors":
                x = layer(x, scale=self.scale)
            elif self.kind == "skipped":
                x = layer(x, skip=index == step % 3)
            elif self.kind == "in parallel":
                extra = extra + layer(first).mean()
            elif self.kind == "in place":
                x = layer(x)
                x += 1.0
            elif self.kind == "detached":
                x = layer(x.detach()) if index == 1 else layer(x)
            elif self.kind == "without grad":
                with torch.set_grad_enabled(index != 0):
                    x = layer(x)
            elif self.kind == "joined":
                x = layer(x) + first
            else:
                x = layer(x)
        return F.mse_loss(self.leave(x), y) + extra


ODD_KINDS = (
    "plain",
    "returns a dict",
    "returns a tuple",
    "keyword tensors",
    "checkpoint inside",
    "reentrant checkpoint inside",
    "in place",
    "view",
    "skipped",
    "in parallel",
    "detached",
    "without grad",
    "joined",
)


def odd(kind):
    torch.manual_seed(0)
    return OddNet(kind)


def train_odd(kinds):
    found = {}
    rank, _ = place()
    with group(30):
        for kind, stage in itertools.product(kinds, STAGES):
            engine = start(odd(kind), stage)
            for step in range(4):
                try:
                    engine.backward(engine(*part_of(rank, step), step))
                except Exception as error:
                    raise AssertionError(f"{kind}, stage {stage}, step {step}") from error
                engine.step()
            found[kind, stage] = engine.state_dict()
            engine.destroy()
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_blocks_may_take_and_give_what_they_like(world):
    found = run_ranks(train_odd, world, ODD_KINDS, timeout=120)[0]
    gaps = {}
    for kind in ODD_KINDS:
        model = odd(kind)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(4):
            optimizer.zero_grad()
            for rank in range(world):
                (model(*part_of(rank, step), step) / world).backward()
            optimizer.step()
        gaps.update({(kind, stage): largest_difference(found[kind, stage], model.state_dict()) for stage in STAGES})
    assert {key: gap for key, gap in gaps.items() if not gap <= 1e-6} == {}, f"world {world}"


# --- several engines in one process -----------------------------------------------------------------------------------


def part_models(kind):
    torch.manual_seed(0)
    return net(), nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))


def train_two(stages, kind):
    """Two engines: alternately, or one behind the other in a single graph, or the second as a frozen critic."""
    rank, _ = place()
    with group(30):
        models = part_models(kind)
        engines = [start(model, stage) for model, stage in zip(models, stages, strict=True)]
        for step in range(STEPS):
            turn_of_two(kind, *engines, rank, step)
            for engine in engines:
                engine.step()
        found = [engine.state_dict() for engine in engines]
        for engine in engines:
            engine.destroy()
    return found


def turn_of_two(kind, first, second, rank, step):
    x, y = part_of(rank, step)
    if kind == "alternately":
        first.backward(first(x, y))
        second.backward(second(torch.ones(2, WIDTH) * y).square().mean())
    elif kind == "interleaved":
        one = first(x, y)
        two = second(torch.ones(2, WIDTH) * y).square().mean()
        first.backward(one)
        second.backward(two)
    else:  # chained
        F.mse_loss(second(first(x)).mean(dim=1, keepdim=True), y).backward()


@pytest.mark.parametrize("stages", [(3, 3), (0, 3), (2, 1), (3, 2)])
@pytest.mark.parametrize("kind", ["alternately", "interleaved", "chained"])
def test_two_engines_in_one_process(kind, stages):
    found = run_ranks(train_two, 2, stages, kind)[0]
    models = part_models(kind)
    optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.05)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(2):
            turn_of_two(kind, *map(Plain, models), rank, step)
        for model in models:
            for p in model.parameters():
                if p.grad is not None:
                    p.grad /= 2
        optimizer.step()
    for weights, model in zip(found, models, strict=True):
        assert largest_difference(weights, model.state_dict()) <= 1e-6


def teach():
    """A frozen teacher in one engine, a student in another; the teacher's weights stay as they were."""
    import shardledger as sl

    found = {}
    rank, _ = place()
    with group(30):
        for stage in STAGES:
            teacher, student = net(), net()
            engines = [sl.initialize(model=model, config=config(stage, lr=0.05))[0] for model in (teacher, student)]
            for step in range(STEPS):
                x, _ = part_of(rank, step)
                with torch.no_grad():
                    wanted = engines[0](x)
                engines[1].backward(F.mse_loss(engines[1](x) * 1.1, wanted))
                engines[1].step()
            found[stage] = [engine.state_dict() for engine in engines]
            for engine in engines:
                engine.destroy()
    return found


def test_a_teacher_and_a_student():
    found = run_ranks(teach, 2)[0]
    teacher, student = net(), net()
    optimizer = torch.optim.SGD(student.parameters(), lr=0.05)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(2):
            x, _ = part_of(rank, step)
            (F.mse_loss(student(x) * 1.1, teacher(x).detach()) / 2).backward()
        optimizer.step()
    for stage, (taught, learnt) in found.items():
        assert largest_difference(taught, teacher.state_dict()) == 0.0, stage
        assert largest_difference(learnt, student.state_dict()) <= 1e-6, stage


# --- what cannot work says so -----------------------------------------------------------------------------------------


class Fails(RuntimeError):
    pass


def fail_and_go_on(where):
    """An exception on all ranks, in forward or in backward, and training goes on as if the call had not been made."""
    found = {}
    rank, _ = place()

    def explode(gradient):
        raise Fails("in backward")

    with group(30):
        for stage in STAGES:
            engine = start(net(), stage)
            for step in range(STEPS):
                with pytest.raises(Fails):
                    if where == "forward":
                        handle = engine.module.blocks[1].linear.register_forward_hook(_raise)
                        try:
                            engine(*part_of(rank, step))
                        finally:
                            handle.remove()
                    else:
                        hidden = engine(part_of(rank, step)[0], order=[0, 1])
                        loss = hidden.square().mean()
                        handle = engine.module.enter.bias.register_hook(explode)
                        try:
                            if where == "backward":
                                engine.backward(loss)
                            else:
                                loss.backward()
                        finally:
                            handle.remove()
                engine.backward(engine(*part_of(rank, step)))
                engine.step()
            found[stage] = engine.state_dict()
            engine.destroy()
    return found


def _raise(*_):
    raise Fails("in forward")


def one_backward(engine, rank, step):
    engine.backward(engine(*part_of(rank, step)))
    engine.step()


BY_NAME["one_backward"] = one_backward


@pytest.mark.parametrize("where", ["forward", "backward", "loss.backward"])
def test_after_an_exception_training_goes_on(where):
    check({("one_backward", stage): weights for stage, weights in run_ranks(fail_and_go_on, 2, where)[0].items()}, 2)


class Smooth(nn.Module):
    """Penalises the slope of its output: a backward pass through a backward pass; x[n, 3] -> loss."""

    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, x, y):
        x = x.detach().requires_grad_()
        loss = self.net(x, y)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + slope.square().sum()


def smooth():
    torch.manual_seed(0)
    return Smooth()


def differentiate_twice():
    found = {}
    rank, _ = place()
    with group(30):
        for stage in STAGES:
            engine = start(smooth(), stage)
            try:
                for step in range(STEPS):
                    engine.backward(engine(*part_of(rank, step)))
                    engine.step()
                found[stage] = engine.state_dict(all_ranks=True)
            except Exception as error:
                found[stage] = f"{type(error).__module__}.{type(error).__name__}: {error}"
            engine.destroy()
    return found


def test_a_gradient_of_a_gradient_is_right_or_refused():
    model = smooth()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(2):
            (model(*part_of(rank, step)) / 2).backward()
        optimizer.step()
    for found in run_ranks(differentiate_twice, 2):
        for stage, weights in found.items():
            if isinstance(weights, str):
                assert stage == 3 and "shardledger.errors" in weights, f"stage {stage}: {weights}"
            else:
                assert largest_difference(weights, model.state_dict()) <= 1e-6, stage
