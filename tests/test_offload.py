import contextlib
import copy
import functools
import itertools
import math
import os
import re
import sys
from collections import Counter, defaultdict

import pytest
import torch
import torch.nn.functional as F
from conftest import model_config, new_log, new_run, put, saved_for_backward
from torch.utils._python_dispatch import TorchDispatchMode

import train as module
from model import MaskedLM, make_loss, mixed_precision
from nanocram import checkpoint, machine, offload, record
from nanocram.data import fill_masks
from nanocram.model_folder import load
from nanocram.offload import Streamed, bytes_on_host, plan_memory
from nanocram.tokenizer import Tokenizer

CPU = torch.device("cpu")


@pytest.fixture
def setting(train, monkeypatch):
    """Set globals of train.py, whose model has gradients that are nowhere zero."""
    change = functools.partial(put, monkeypatch, module)
    change(zero_init=False, dropout=0.1, samples="", max_steps=5, evals=2, optimizer="adamw")
    return change


@pytest.fixture
def sums_travel(monkeypatch):
    """A function: from now on the sums of all blocks' gradients find no room on the device."""
    return lambda: monkeypatch.setattr(module, "plan_memory", lambda *args, **sizes: False)


def step(run, progress):
    """(loss, norm of the gradient) of a step of train.py."""
    module.train_step(run, progress)
    return run.state.last["loss"], run.state.last["grad_norm"]


def weights_of(run):
    return {name: p.detach().clone() for name, p in run.model.named_parameters()}


def assert_equal(weights, others):
    assert weights.keys() == others.keys()
    assert all(torch.equal(weights[name], others[name]) for name in weights)


@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "bfloat16", "head_transform": True},
        {"n_narrow": 2, "n_layer": 4, "batch_size": 24, "travel": True},
        pytest.param({"position_embedding": "learned", "post_norm": True}, marks=pytest.mark.slow),
        {"optimizer": "adam", "position_embedding": "sinusoidal", "n_layer": 3},
    ],
)
def test_offload_is_the_plain_run_bit_for_bit(setting, sums_travel, tmp_path, settings):
    """Weights after a run with batch ramp, dropout and clipping, its losses, its optimisers."""
    if settings.pop("travel", False):
        sums_travel()
    setting(**settings)
    ends, rows = [], []
    for on_host in (False, True):
        out = tmp_path / f"{on_host}"
        setting(offload=on_host, out_dir=str(out))
        module.main()
        ends.append(torch.load(out / "ckpt.pt", weights_only=True))
        rows.append([row | {"elapsed_s": 0} for row in record.read_log(out)])
    assert rows[0] == rows[1] and rows[0][-1]["step"] == 5
    plain, other = ends
    assert_equal(plain["model"], other["model"])
    for ours, theirs in zip(plain["optimizers"], other["optimizers"], strict=True):
        assert ours.keys() == theirs.keys() and ours
        for name in ours:
            assert_equal(ours[name], theirs[name])
    assert_equal(*(load(tmp_path / name).state_dict() for name in ("False", "True")))


ANOTHER_ORDER = {"post_norm": True, "n_narrow": 3, "linear_bias": True, "activation": "relu2"}


@pytest.mark.parametrize("sums_stay", [True, False])
@pytest.mark.parametrize(
    "switches",
    [
        {"n_layer": 1, "token_types": 2, "norm_bias": True},
        {"n_layer": 2, "position_embedding": "sinusoidal_fixed", "first_attn_norm": True},
        {"n_narrow": 3, "final_norm": False, "decoder_bias": False},
        {
            "post_norm": True,
            "position_embedding": "learned",
            "embedding_norm": False,
            "activation": "gelu",
        },
        ANOTHER_ORDER,
    ],
)
def test_gradients_are_the_plain_models(switches, sums_stay):
    """Of three micro-batches, to the bit, at sizes that need padding.

    Several narrow blocks with their norms behind them add up keys' and values' gradients for their
    context in another order: equal to rounding."""
    sizes = {"vocab_size": 301, "n_layer": 4, "n_head": 2, "n_embd": 20, "n_inner": 27}
    plain = MaskedLM(model_config(**(sizes | {"dropout": 0.1, "zero_init": False} | switches)))
    model = copy.deepcopy(plain)
    streamed = Streamed(model, CPU, torch.float32, sums_stay)
    assert all(p.data_ptr() % 16 == 0 for p in streamed.twin.parameters())
    ids = torch.randint(301, (6, 16))
    positions = torch.tensor([[1, 3, 4, 9]]).expand(6, 4)
    batch = ids, positions, ids.gather(1, positions)
    for micro_batch in range(3):
        for either in (plain, model):
            torch.manual_seed(micro_batch)
            make_loss(either, CPU, torch.float32)(*batch).backward()
    streamed.collect()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
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
        new_log(run)
        checkpoint.write(run, module.out_dir, "adamw")
        setting(offload=second)
        run = new_run()
        checkpoint.restore(run, module.out_dir, "adamw")
        for i in range(3, 5):
            step(run, i / 5)
        ends.append(weights_of(run))
    assert_equal(ends[0], ends[1])
    assert_equal(ends[0], ends[2])


def test_a_rehearsal_leaves_nothing(setting):
    """The step after it, as after a micro-batch that found no memory, is a fresh run's."""
    setting(offload=True)
    rehearsed, fresh = new_run(), new_run()
    rehearsed.loss_fn(*module.batch_at(rehearsed, 64, 20)).backward()
    rehearsed.model.zero_grad()
    assert step(rehearsed, 0.9) == step(fresh, 0.9)


def test_blocks_keep_their_input_alone(setting):
    """For the backward pass; and autocast keeps no copies of weights."""
    setting(offload=True)

    def kept(n_layer):
        setting(n_layer=n_layer)
        run = new_run()
        batch = module.batch_at(run, 0, 20)
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


def test_guesses_are_the_plain_models(setting, data_dir):
    """Without autocast, as there, whatever training has."""
    tokenizer = Tokenizer(data_dir / "tokenizer.json")
    words = []
    for on_host in (False, True):
        setting(offload=on_host)
        run = new_run(torch.bfloat16)
        words.append(fill_masks(run.model, tokenizer, "once upon a [MASK]."))
        step(run, 0.9)
        words.append(fill_masks(run.model, tokenizer, "once upon a [MASK]."))
    assert words[:2] == words[2:] and words[0] != words[1]


def test_offload_with_a_loss_scale(setting):
    """float16: steps that overflow are skipped, the scale falls, weights stay the plain run's."""
    ends = []
    for on_host in (False, True):
        setting(offload=on_host)
        run = new_run(torch.float16)
        run.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
        run.scaler.scale(torch.zeros(()))
        while run.state.applied_steps < 2:
            step(run, 0.5)
        ends.append((run.state, run.scaler.get_scale(), weights_of(run)))
    (state, scale, weights), (other_state, other_scale, other_weights) = ends
    assert state == other_state and state.skipped > 0 and scale == other_scale < 2.0**24
    assert_equal(weights, other_weights)


def in_gb(words, text):
    """The figure that stands before words."""
    return float(re.search(r"([\d.e+-]+) GB " + words, text)[1])


@pytest.fixture
def plan_of(monkeypatch, capsys):
    """plan_memory() where so many bytes are free; (what it says, whether the sums stay)."""

    def plan_of(
        config,
        amp_dtype=torch.float32,
        rows=8,
        free_host=math.inf,
        free_device=math.inf,
        device=CPU,
    ):
        free = iter((free_host, free_device))
        monkeypatch.setattr(machine, "free_bytes", lambda where: next(free))
        sizes = {"rows": rows, "seq_len": 128, "n_predicted": 38}
        sums_stay = plan_memory(config, device, amp_dtype, **sizes)
        return capsys.readouterr().out, sums_stay

    return plan_of


@pytest.mark.parametrize("pinned", [False, True])
def test_the_plan_of_the_host(setting, plan_of, monkeypatch, pinned):
    """By a count of the model's parameters; one byte less than that is refused in a line."""
    setting(n_layer=6)
    config = module.check_settings()
    model = MaskedLM(config)
    sizes = [4 * sum(p.numel() for p in block.parameters()) for block in model.model.layers]
    every = 4 * sum(p.numel() for p in model.parameters())
    sizes.append(every - sum(sizes))
    held = [2 ** math.ceil(math.log2(size)) for size in sizes] if pinned else sizes
    needed = 2 * sum(held) + 3 * every
    monkeypatch.setattr(
        offload, "bytes_on_host", lambda sizes, **_: bytes_on_host(sizes, pinned=pinned)
    )
    text, _ = plan_of(config, free_host=needed)
    assert in_gb("in host memory", text) == pytest.approx(needed / 1e9, rel=0.005)
    with pytest.raises(SystemExit, match="--n_layer") as e:
        plan_of(config, free_host=needed - 1)
    assert "\n" not in str(e.value)
    with pytest.raises(SystemExit) as e:
        plan_of(config, free_host=needed / 4)
    assert in_gb("more than", str(e.value)) == pytest.approx(0.75 * needed / 1e9, rel=0.005)


@pytest.mark.parametrize("amp_dtype", [torch.float32, torch.bfloat16])
def test_the_plan_of_the_device(setting, plan_of, amp_dtype):
    """Activations against what a block and the loss keep; the sums that find room."""
    setting(n_layer=6, n_embd=128, n_inner=256, dropout=0.0)
    config = module.check_settings()
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
    # On a GPU in bfloat16 the inputs are in it too, but where norms behind the sums make float32.
    for post_norm in (False, True):
        setting(post_norm=post_norm)
        other = module.check_settings()
        on_cpu, on_gpu = (
            in_gb("on the device", plan_of(other, amp_dtype, 16, device=device)[0])
            for device in (CPU, torch.device("cuda"))
        )
        is_low = amp_dtype == torch.bfloat16 and not post_norm
        saved = 6 * 16 * 2 * 128 * 128 if is_low else 0
        assert on_cpu - on_gpu == pytest.approx(saved / 1e9, abs=2e-4)

    # All sums stay where they leave a tenth of the card free; they are those of four more blocks.
    needed = in_gb("on the device", few)
    fits = plan_of(config, amp_dtype, free_device=1.12e9 * needed)
    tight = plan_of(config, amp_dtype, free_device=1.1e9 * needed)
    assert fits == (few, True) and not tight[1]
    sums = 4 * sum(p.nbytes for p in block.parameters())
    difference = needed - in_gb("on the device", tight[0])
    assert difference == pytest.approx(sums / 1e9, abs=2e-4)


def test_the_plan_comes_before_anything_is_made(setting, monkeypatch, tmp_path):
    setting(offload=True)
    monkeypatch.setattr(module, "MaskedLM", None)
    monkeypatch.setattr(machine, "free_bytes", lambda where: 1000)
    with pytest.raises(SystemExit, match="GB more than are free"):
        module.main()
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="others do not tell")
def test_free_memory_is_what_the_system_says():
    """Between what nothing uses at all, other processes aside, and all there is."""
    pages = os.sysconf("SC_AVPHYS_PAGES"), os.sysconf("SC_PHYS_PAGES")
    unused, every = (n * os.sysconf("SC_PAGE_SIZE") for n in pages)
    assert 0.5 * unused < machine.free_bytes(CPU) < every


def test_the_limit_of_a_container_counts(monkeypatch, tmp_path):
    """Where a batch job may take less than the machine has, that is what is free."""
    monkeypatch.setattr(machine, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    assert machine.free_bytes(CPU) == math.inf
    (tmp_path / "meminfo").write_text("MemTotal: 2000 kB\nMemAvailable:   1000 kB\n")
    assert machine.free_bytes(CPU) == 1_024_000
    (tmp_path / "memory.current").write_text("130000\n")
    (tmp_path / "memory.stat").write_text("anon 90000\ninactive_file 30000\nactive_file 10000\n")
    for limit, free in (("max", 1_024_000), ("500000", 400_000), ("5000000", 1_024_000)):
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        assert machine.free_bytes(CPU) == free


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
        run = new_run()
        if compiled:
            run.loss_fn = run.streamed.compile(run.loss_fn)
        ends.append((step(run, 0.9), weights_of(run)))
        module.mean_loss(run, [[x[:3] for x in module.batch_at(run, 0, 20)]])
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 3 * compiled
    assert ends[0][0] == ends[1][0]
    assert_equal(ends[0][1], ends[1][1])


def test_where_blocks_do_not_compile_they_run_eager(setting, monkeypatch):
    """With the loss function from before, as train.py goes on."""

    def broken(*args):
        raise RuntimeError("no compiler")

    setting(offload=True)
    monkeypatch.setattr(torch, "compile", lambda block_forward, **options: broken)
    tried, fresh = new_run(), new_run()
    with pytest.raises(RuntimeError, match="no compiler"):
        tried.streamed.compile(tried.loss_fn)(*module.batch_at(tried, 0, 20))
    assert step(tried, 0.9) == step(fresh, 0.9)


@pytest.mark.slow
def test_blocks_compile_with_inductor(setting):
    """In seconds a graph; its sums round otherwise."""
    setting(offload=True, n_layer=4, dropout=0.0)
    compiled, plain = new_run(), new_run()
    compiled.loss_fn = compiled.streamed.compile(compiled.loss_fn)
    for _ in range(3):
        (loss, norm), (wanted_loss, wanted_norm) = step(compiled, 0.9), step(plain, 0.9)
        assert loss == pytest.approx(wanted_loss, rel=1e-5)
        assert norm == pytest.approx(wanted_norm, rel=1e-3)


# What runs on a device is known by its order alone: a race that no CPU has is found by clocks.


class Clocked:
    """The host or a stream: how far it is, and how far all others are known to be."""

    def __init__(self, name):
        self.name = name
        self.clock = defaultdict(int)

    def join(self, clock):
        for name, tick in clock.items():
            self.clock[name] = max(self.clock[name], tick)


class Streams:
    """torch.cuda's streams and events, in vector clocks; its names are those of that module.

    left_out: the line of offload.py whose waits do nothing."""

    def __init__(self, left_out=0):
        self.host = Clocked("host")
        self.all = []
        self.left_out = left_out
        self.waits = set()  # the lines of offload.py that wait
        streams = self

        class Stream(Clocked):
            def __init__(self):
                super().__init__(f"stream {len(streams.all)}")
                streams.all.append(self)

            def wait_stream(self, other):
                if streams.is_heeded():
                    self.join(other.clock)

        class Event:
            def __init__(self):
                self.clock = {}  # of one that was never recorded: nobody waits

            def record(self, stream):
                self.clock = dict(stream.clock)

            def wait(self, stream):
                if streams.is_heeded():
                    stream.join(self.clock)

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
                self.host.join(stream.clock)


class Races(TorchDispatchMode):
    """Watches every operator, forward and backward, at the memory that a Streamed model shares.

    races: accesses of which one writes, and neither is sure to come first. log: what computes with
    a block's weights, and what copies of its buffers, in the order in which they are queued."""

    def __init__(self, streams, streamed):
        super().__init__()
        self.streams = streams
        self.on_host = {}  # {address: (what is in it, of which block)}
        self.slots = {}  # the same
        for i, group in enumerate([*streamed.groups, streamed.resident]):
            self.on_host[address(group.weights)] = ("weights", i)
            self.on_host[address(group.sums)] = ("sums", i)
            self.slots[address(group.weight_slot.buffer)] = ("weights", -1)
            self.slots[address(group.sum_slot.buffer)] = ("sums", -1)
        self.accesses = defaultdict(dict)  # of an address: the last tick of (who, whether it wrote)
        self.races = []
        self.log = []

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
        read &= self.on_host.keys() | self.slots.keys()
        written &= self.on_host.keys() | self.slots.keys()
        if (read or written) and not is_view:
            self.access(read - written, written)
        return result

    def access(self, read, written):
        """An operator that no slot is part of is the host's; all others are of the stream."""
        slots = (read | written) & self.slots.keys()
        who = self.streams.current if slots else self.streams.host
        who.join(self.streams.host.clock)  # what is queued comes after what the host has done
        who.clock[who.name] += 1
        for place in read | written:
            for (other, has_written), tick in self.accesses[place].items():
                if (place in written or has_written) and who.clock[other] < tick:
                    self.races.append((other, who.name))
            self.accesses[place][who.name, place in written] = who.clock[who.name]

        copied = (read | written) & self.on_host.keys()
        if slots and copied:
            ((kind, block),) = (self.on_host[place] for place in copied)
            if kind == "weights":
                self.slots[min(slots)] = (kind, block)
            kind = "home" if copied <= written else kind
            self.log.append((kind, block, dict(who.clock)))
        for place in slots - written:
            kind, block = self.slots[place]
            if kind == "weights" and not copied:
                self.log.append(("compute", block, dict(who.clock)))


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
        module.mean_loss(run, [module.batch_at(run, 0, 20)])
        step(run, 0.9)
    return run, streams, races


def test_no_two_streams_meet_in_a_buffer(setting, sums_travel, monkeypatch):
    """And each wait is needed for that: without any of them there are races."""
    waits, racy = set(), set()
    for travels in (False, True):
        if travels:
            sums_travel()
        run, streams, races = watched_run(setting, monkeypatch, 3)
        assert run.state.step == 2 and len(races.log) > 200 and not races.races
        assert run.streamed.sums_stay != travels
        waits |= streams.waits
        for line in streams.waits - racy:
            if watched_run(setting, monkeypatch, 3, line)[2].races:
                racy.add(line)
    assert racy == waits and len(waits) == 6


@pytest.mark.parametrize("n_layer", [1, 2])
def test_few_blocks_keep_their_sums(setting, sums_travel, monkeypatch, n_layer):
    """Where there are no more of them than slots, nothing has to travel, and nothing races."""
    sums_travel()
    run, _, races = watched_run(setting, monkeypatch, n_layer)
    assert run.streamed.sums_stay and not races.races


@pytest.mark.parametrize("travels", [False, True])
def test_copies_hide_behind_the_blocks_before_them(setting, sums_travel, monkeypatch, travels):
    """The next block's weights are queued before a block computes, in both directions."""
    if travels:
        sums_travel()
    run, streams, races = watched_run(setting, monkeypatch, 5)
    n = len(run.streamed.groups)
    log = [entry for entry in races.log if entry[1] < n]  # not of what stays on the device

    # Where in the log a block begins to compute, forward or backward, with which of its copies.
    starts, n_copies = [(-1, 0, 0)], Counter()
    for at, (kind, block, _) in enumerate(log):
        n_copies[block] += kind == "weights"
        if kind == "compute" and starts[-1][:2] != (block, n_copies[block]):
            starts.append((block, n_copies[block], at))
    there = [*range(n)]
    back = there[-2::-1]  # nothing is copied again where the direction turns
    step = [*there, *back, *there[1:], *back]
    assert [block for block, *_ in starts[1:]] == [*step, *there, *step]
    for (*_, before), (block, _, at) in itertools.pairwise(starts[1:]):
        if block > 0:  # block 0 is first in a pass: no block is there to hide it
            queued = [i for i in range(at) if log[i][:2] == ("weights", block)]
            assert queued[-1] < before

    # Every block's sums go home: at the end of a step, or in each micro-batch. Then the block that
    # computes next waits for none of it.
    home = [block for kind, block, _ in log if kind == "home"]
    assert home == ([*reversed(there)] * 4 if travels else there * 2)
    down = f"stream {streams.all.index(run.streamed.d2h)}"
    for i, (kind, block, clock) in enumerate(log):
        if travels and kind == "home" and block > 0:
            following = next(entry for entry in log[i:] if entry[0] == "compute")
            assert following[1] == block - 1
            assert following[2].get(down, 0) < clock[down]
    # What comes with the weights comes for the second micro-batch of a step.
    came = sum(kind == "sums" for kind, _, _ in log)
    assert came == (2 * n if travels else 0)
