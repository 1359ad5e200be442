"""A model in host memory beside the plain one, the plan of its memory, its copies and streams."""

import contextlib
import functools
import math
import re
import sys
from collections import defaultdict

import pytest
import torch
import torch.nn.functional as F
from conftest import model_config, new_log, new_run, put, saved_for_backward
from torch.utils._python_dispatch import TorchDispatchMode

import train as module
from model import MaskedLM, make_loss, mixed_precision
from nanocram import checkpoint, machine, offload, runlog
from nanocram.offload import Streamed, plan_memory

CPU = torch.device("cpu")
BATCH_SHAPE = 8, 128, 38


@pytest.fixture
def setting(train, monkeypatch):
    """Set globals of train.py, whose model has gradients that are nowhere zero."""
    change = functools.partial(put, monkeypatch, module)
    change(zero_init=False, dropout=0.1, max_steps=5, evals=2, optimizer="adamw")
    return change


@pytest.fixture
def sums_travel(monkeypatch):
    """A function: from now on the sums of all blocks' gradients find no room on the device."""
    return lambda: monkeypatch.setattr(offload, "plan_memory", lambda *args: False)


def step(run, progress):
    """(loss, norm of the gradient) of a step of train.py."""
    module.train_step(run, progress)
    return run.state.last["loss"], run.state.last["grad_norm"]


def weights_of(run):
    return {name: p.detach().clone() for name, p in run.model.named_parameters()}


def assert_equal(tensors, others):
    assert tensors.keys() == others.keys() and tensors
    assert all(torch.equal(tensors[name], others[name]) for name in tensors)


@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "bfloat16", "head_transform": True},
        {"n_narrow": 2, "n_layer": 4, "batch_size": 24, "travel": True},
        {"optimizer": "adam", "position_embedding": "sinusoidal", "n_layer": 3},
    ],
)
def test_offload_is_the_plain_run_bit_for_bit(setting, sums_travel, tmp_path, capsys, settings):
    """Weights after a run with batch ramp, dropout and clipping, losses, optimisers, guesses."""
    if settings.pop("travel", False):
        sums_travel()
    setting(**settings)
    ends, rows, guesses = [], [], []
    for on_host in (False, True):
        out = tmp_path / f"{on_host}"
        setting(offload=on_host, out_dir=str(out))
        module.main()
        ends.append(torch.load(out / "ckpt.pt", weights_only=True))
        rows.append([row | {"elapsed_s": 0} for row in runlog.read_log(out)])
        guesses.append(re.findall(r"^ *once upon a \[MASK\]\..*", capsys.readouterr().out, re.M))
    assert rows[0] == rows[1] and rows[0][-1]["step"] == 5
    assert guesses[0] == guesses[1] != []
    plain, other = ends
    assert_equal(plain["model"], other["model"])
    for ours, theirs in zip(plain["optimizers"], other["optimizers"], strict=True):
        for key in ours["state"]:
            assert_equal(ours["state"][key], theirs["state"][key])


ANOTHER_ORDER = {"post_norm": True, "n_narrow": 3, "linear_bias": True, "activation": "relu2"}
LEARNED = {"position_embedding": "learned", "embedding_norm": False, "activation": "gelu"}


@pytest.mark.parametrize("sums_stay", [True, False])
@pytest.mark.parametrize(
    "switches",
    [
        {"n_layer": 1, "token_types": 2, "norm_bias": True},
        {"n_layer": 2, "position_embedding": "sinusoidal_fixed", "first_attn_norm": True},
        {"n_narrow": 3, "final_norm": False, "decoder_bias": False},
        LEARNED | {"post_norm": True},
        ANOTHER_ORDER,
    ],
)
def test_gradients_are_the_plain_models(sums_travel, switches, sums_stay):
    """Of three micro-batches, to the bit, at sizes that need padding.

    Several narrow blocks with their norms behind them add up keys' and values' gradients for their
    context in another order: equal to rounding."""
    if not sums_stay:
        sums_travel()
    sizes = {"vocab_size": 301, "n_layer": 4, "n_head": 2, "n_embd": 20, "n_inner": 27}
    config = model_config(**(sizes | {"dropout": 0.1, "zero_init": False} | switches))
    torch.manual_seed(0)
    plain = MaskedLM(config)
    torch.manual_seed(0)
    streamed = Streamed(config, CPU, torch.float32, BATCH_SHAPE)
    assert all(p.data_ptr() % 16 == 0 for p in streamed.twin.parameters())
    ids = torch.randint(301, (6, 16))
    positions = torch.tensor([[1, 3, 4, 9]]).expand(6, 4)
    batch = ids, positions, ids.gather(1, positions)
    for micro_batch in range(3):
        for either in (plain, streamed.model):
            torch.manual_seed(micro_batch)
            make_loss(either, CPU, torch.float32)(*batch).backward()
    streamed.collect()
    for ours, theirs in zip(streamed.model.parameters(), plain.parameters(), strict=True):
        if switches is ANOTHER_ORDER:
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-5)
        else:
            assert torch.equal(ours.grad, theirs.grad)


def test_a_run_goes_on_with_and_without_offload(setting, tmp_path):
    """Three steps offloaded and two plain are five plain ones, and the other way round."""
    ends = []
    for first, second in ((False, False), (True, False), (False, True)):
        setting(offload=first, out_dir=str(tmp_path / f"{first}{second}"))
        run = new_run()
        for i in range(3):
            step(run, i / 5)
        path = new_log(run).folder / "ckpt.pt"
        checkpoint.save(run, path, "adamw")
        setting(offload=second)
        run = new_run()
        checkpoint.load(run, path, "adamw")
        for i in range(3, 5):
            step(run, i / 5)
        ends.append(weights_of(run))
    assert_equal(ends[0], ends[1])
    assert_equal(ends[0], ends[2])


def test_a_pass_that_finds_no_memory_leaves_nothing(setting, monkeypatch):
    """A step after it is a fresh run's."""
    setting(offload=True)
    tried, fresh = new_run(), new_run()
    get_sums = tried.streamed.get_sums

    def out_of_memory_in_block_0(i):
        if i == 0:
            raise torch.OutOfMemoryError("out of memory")
        get_sums(i)

    loss = tried.loss_fn(*module.masked_batch(tried, 64, 20))
    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(tried.streamed, "get_sums", out_of_memory_in_block_0)
        loss.backward()
    tried.model.zero_grad()
    assert step(tried, 0.9) == step(fresh, 0.9)


def test_blocks_keep_their_input_alone(setting):
    """For the backward pass; and autocast keeps no copies of weights."""
    setting(offload=True)

    def kept(n_layer):
        setting(n_layer=n_layer)
        run = new_run()
        batch = module.masked_batch(run, 0, 20)
        on_device = run.streamed.twin.parameters()
        return saved_for_backward(lambda: run.loss_fn(*batch), on_device)

    # Rows, tokens, width, bytes: the fifth block's input, no more.
    assert kept(5) - kept(4) == 8 * 128 * 32 * 4


def test_device_memory_holds_two_blocks(setting, sums_travel):
    """Of weights, and of gradients where they have no room; both are there once for all."""
    setting(offload=True, n_layer=5)
    sums_travel()
    streamed = new_run().streamed
    slots = {id(slot): slot.buffer for g in streamed.groups for slot in (g.weight_slot, g.sum_slot)}
    largest = sum(p.numel() for p in streamed.model.model.layers[1].parameters())
    assert sorted(map(len, slots.values())) == [largest] * 4
    outside = {p.untyped_storage().data_ptr() for p in streamed.twin.parameters()}
    inside = {buffer.untyped_storage().data_ptr() for buffer in slots.values()}
    assert len(outside - inside) == 1


def test_offload_with_a_loss_scale(setting):
    """float16: steps that overflow are skipped, the scale falls, weights stay the plain run's."""
    ends = []
    for on_host in (False, True):
        setting(offload=on_host)
        run = new_run(torch.float16)
        run.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
        run.scaler.scale(torch.zeros(()))
        while run.state.step - run.state.skipped < 2:
            step(run, 0.5)
        ends.append((run.state, run.scaler.get_scale(), weights_of(run)))
    (state, scale, weights), (other_state, other_scale, other_weights) = ends
    assert state == other_state and state.skipped > 0 and scale == other_scale < 2.0**24
    assert_equal(weights, other_weights)


def test_compiled_blocks_compute_the_same(setting, monkeypatch):
    """To the bit, dropout included, without inductor: what is captured is what is written.

    Blocks share a graph: there is one of the first, of the middle, and of the last. An evaluation
    of other shapes adds none."""
    setting(offload=True, n_layer=4)
    compile_ = functools.partial(torch.compile, backend="eager")
    monkeypatch.setattr(torch, "compile", compile_)
    ends = []
    for compiled in (False, True):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        setting(compile=compiled)
        run = new_run()
        ends.append((step(run, 0.9), weights_of(run)))
        module.estimate_loss(run, [[x[:3] for x in module.masked_batch(run, 0, 20)]])
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 3 * compiled
    assert ends[0][0] == ends[1][0]
    assert_equal(ends[0][1], ends[1][1])


# The plan of memory


def in_gb(words, text):
    """The figure that stands before words."""
    return float(re.search(r"([\d.e+-]+) GB " + words, text)[1])


@pytest.fixture
def plan_of(monkeypatch, capsys):
    """plan_memory() where so many bytes are free; (what it says, whether the sums stay)."""

    def plan_of(config, dtype=torch.float32, rows=8, host=math.inf, device=math.inf, dev=CPU):
        free = iter((host, device))
        monkeypatch.setattr(machine, "free_bytes", lambda where: next(free))
        sums_stay = plan_memory(config, dev, dtype, (rows, 128, 38))
        return capsys.readouterr().out, sums_stay

    return plan_of


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_the_plan_of_the_host(setting, plan_of, name):
    """By a count of the model's parameters; one byte less than that is refused in a line.

    Pinned memory comes in powers of two."""
    setting(n_layer=6)
    config = module.model_config()
    model = MaskedLM(config)
    sizes = [4 * sum(p.numel() for p in block.parameters()) for block in model.model.layers]
    every = 4 * sum(p.numel() for p in model.parameters())
    sizes.append(every - sum(sizes))
    held = [2 ** math.ceil(math.log2(size)) for size in sizes] if name == "cuda" else sizes
    needed = 2 * sum(held) + 3 * every
    plan = functools.partial(plan_of, config, dev=torch.device(name))
    assert in_gb("in host memory", plan(host=needed)[0]) == pytest.approx(needed / 1e9, rel=0.005)
    with pytest.raises(SystemExit, match=r"^.*--n_layer.*$"):
        plan(host=needed - 1)
    with pytest.raises(SystemExit) as e:
        plan(host=needed / 4)
    assert in_gb("more than", str(e.value)) == pytest.approx(0.75 * needed / 1e9, rel=0.005)


def test_too_large_a_model_is_refused_before_anything_is_made(setting, monkeypatch, tmp_path):
    setting(offload=True)
    monkeypatch.setattr(offload, "Group", None)
    monkeypatch.setattr(machine, "free_bytes", lambda where: 1000)
    with pytest.raises(SystemExit, match="GB more than are free"):
        module.main()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("amp_dtype", [torch.float32, torch.bfloat16])
def test_the_plan_of_the_device(setting, plan_of, amp_dtype):
    """Activations against what a block and the loss keep; the sums that find room."""
    setting(n_layer=6, n_embd=128, n_inner=256, dropout=0.0)
    config = module.model_config()
    few, many = (plan_of(config, amp_dtype, rows)[0] for rows in (8, 16))
    model = MaskedLM(config)
    block = model.model.layers[1]
    rope = [x[:128, None].to(amp_dtype) for x in (model.model.rope_cos, model.model.rope_sin)]

    def one_block(rows):
        x = torch.zeros(rows, 128, 128, requires_grad=True)
        with mixed_precision(CPU, amp_dtype):
            return block(x, rope, None).sum()

    def loss(rows):
        x = torch.zeros(rows, 128, 128, requires_grad=True)
        with mixed_precision(CPU, amp_dtype):
            logits = model.decoder(x[:, :38]).flatten(0, 1)
        return F.cross_entropy(logits.float(), torch.ones(rows * 38, dtype=torch.long))

    def kept(work, rows):
        return saved_for_backward(functools.partial(work, rows), model.parameters())

    # A block is computed anew only when the logits are gone.
    larger = max(kept(work, 16) - kept(work, 8) for work in (one_block, loss))
    inputs = 6 * 8 * 4 * 128 * 128
    more = in_gb("on the device", many) - in_gb("on the device", few)
    assert more == pytest.approx((larger + inputs) / 1e9, rel=0.35)
    # All sums stay where they leave a tenth of the card free; they are those of four more blocks.
    needed = in_gb("on the device", few)
    fits = plan_of(config, amp_dtype, device=1.12e9 * needed)
    tight = plan_of(config, amp_dtype, device=1.1e9 * needed)
    assert fits == (few, True) and not tight[1]
    sums = 4 * sum(p.nbytes for p in block.parameters())
    difference = needed - in_gb("on the device", tight[0])
    assert difference == pytest.approx(sums / 1e9, abs=2e-4)


def test_the_limit_of_a_container_counts(monkeypatch, tmp_path):
    """Where a batch job may take less than the machine has, that is what is free."""
    monkeypatch.setattr(machine, "Path", lambda path: tmp_path / path.rpartition("/")[2])
    assert machine.free_bytes(CPU) == math.inf  # neither file is there
    (tmp_path / "meminfo").write_text("MemTotal: 2000 kB\nMemAvailable:   1000 kB\n")
    (tmp_path / "cgroup").mkdir()
    (tmp_path / "cgroup/memory.current").write_text("100000\n")
    for limit, free in (("max", 1_024_000), ("500000", 400_000), ("5000000", 1_024_000)):
        (tmp_path / "cgroup/memory.max").write_text(f"{limit}\n")
        assert machine.free_bytes(CPU) == free


# Of what runs on a device only the order is known. Vector clocks find a race that no CPU has.


class Clock(defaultdict):
    """{stream or host: how far it is known to be}, as one of them knows it."""

    def __init__(self):
        super().__init__(int)

    def join(self, other):
        for name, tick in other.items():
            self[name] = max(self[name], tick)


class Streams:
    """Streams and events in the place of torch.cuda's. The waits of one line may be left out."""

    def __init__(self, left_out=0):
        self.host = Clock()
        self.all = []
        self.left_out = left_out
        self.waits = set()  # the lines of offload.py that wait
        streams = self

        class Stream(Clock):
            def __init__(self):
                super().__init__()
                streams.all.append(self)

            def wait_stream(self, other):
                if streams.is_heeded():
                    self.join(other)

        class Event:
            recorded = Clock()  # of one that was never recorded: nobody waits

            def record(self, stream):
                self.recorded = dict(stream)

            def wait(self, stream):
                if streams.is_heeded():
                    stream.join(self.recorded)

        self.Stream = Stream
        self.Event = Event
        self.current = Stream()

    def is_heeded(self):
        line = sys._getframe(2).f_lineno
        self.waits.add(line)
        return line != self.left_out

    def current_stream(self):
        return self.current

    @contextlib.contextmanager
    def stream(self, stream):
        before = self.current
        self.current = stream
        yield
        self.current = before

    def synchronize(self):
        if self.is_heeded():
            for stream in self.all:
                self.host.join(stream)


class Races(TorchDispatchMode):
    """Watches the buffers that a Streamed model shares, at every operator, forward and backward.

    races: pairs of accesses of which one writes, and neither is sure to come first."""

    def __init__(self, streams, streamed):
        super().__init__()
        self.streams = streams
        groups = [*streamed.groups, streamed.resident]
        slots = [slot for group in groups for slot in (group.weight_slot, group.sum_slot)]
        self.slots = {address(slot.buffer) for slot in slots}
        self.on_host = {address(flat) for group in groups for flat in (group.weights, group.sums)}
        self.accesses = defaultdict(dict)  # of an address: the last tick of (who, whether it wrote)
        self.races = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        read, written = set(), set()
        for i, argument in enumerate(func._schema.arguments):
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            is_changed = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in value if isinstance(value, list | tuple) else [value]:
                if isinstance(tensor, torch.Tensor):
                    (written if is_changed else read).add(address(tensor))
        is_view = not written and any(r.alias_info is not None for r in func._schema.returns)
        shared = (read | written) & (self.on_host | self.slots)
        if shared and not is_view:
            self.access(shared, written)
        return result

    def access(self, places, written):
        """An operator that no slot is part of is the host's; all others are of the stream."""
        host = self.streams.host
        who = self.streams.current if places & self.slots else host
        who.join(host)  # what is queued comes after what the host has done
        who[id(who)] += 1
        for place in places:
            for (other, has_written), tick in self.accesses[place].items():
                if (place in written or has_written) and who[other] < tick:
                    self.races.append((other, id(who)))
            self.accesses[place][id(who), place in written] = who[id(who)]


def address(tensor):
    return tensor.untyped_storage().data_ptr()


def watched_run(setting, monkeypatch, n_layer, left_out=0):
    """Two steps of two micro-batches, and an evaluation between them."""
    setting(offload=True, n_layer=n_layer)
    streams = Streams(left_out)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_device_module", lambda dev: streams)
        run = new_run()
    with Races(streams, run.streamed) as races:
        step(run, 0.9)
        module.estimate_loss(run, [module.masked_batch(run, 0, 20)])
        step(run, 0.9)
    return run, streams, races


def test_no_two_streams_meet_in_a_buffer(setting, sums_travel, monkeypatch):
    """And each wait is needed for that: without any of them there are races."""
    waits, racy = set(), set()
    for travels in (False, True):
        if travels:
            sums_travel()
        run, streams, races = watched_run(setting, monkeypatch, 3)
        assert run.state.step == 2 and len(races.accesses) > 10 and not races.races
        assert run.streamed.sums_stay != travels
        waits |= streams.waits
        for line in streams.waits - racy:
            if watched_run(setting, monkeypatch, 3, line)[2].races:
                racy.add(line)
    assert racy == waits and len(waits) == 6
    # where there are no more blocks than slots, no sums have to travel
    run, _, races = watched_run(setting, monkeypatch, 2)
    assert run.streamed.sums_stay and not races.races
