"""What a GPU has to show: numerics, waiting, compiling, memory, resumes, fine-tuning, offload.

    python -m pytest -rP tests/test_gpu.py   # what each saw; not with -n: they would share the GPU

conftest.py hides the GPU from all other tests. Here a check is a script as a user starts it, or a
function of a device's name in a process of its own. Where it makes sense the same check runs with
"cpu" too (-m slow), so that this file is tested where there is no GPU. All 36 on a GPU
have passed on an H100 (2026-11-26).
"""

import copy
import functools
import gc
import itertools
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields

import pytest
import torch
from conftest import ROOT, SMALL_MODEL, any_words, script
from safetensors.torch import load_file

import bench
import train
from model import MaskedLM, ModelConfig, make_loss
from nanocram import glue, machine, runlog
from nanocram.settings import configure

DTYPES = ("float32", "bfloat16", "float16")
# Of products, as torch.set_float32_matmul_precision() calls them where they are in float32. What
# training has there is "high", TF32 on a GPU: a card that truncates to it gives gradients that are
# 1.1e-3 off in the default and 4.5e-3 in crammed BERT (emulated on a CPU), as a sound one should.
PRODUCTS = {
    "full": (torch.float32, "highest"),
    "float32": (torch.float32, "high"),
    "bfloat16": (torch.bfloat16, "high"),
    "float16": (torch.float16, "high"),
}
PRECISION = {"full": 1e-4, "float32": 1e-2, "bfloat16": 1e-2, "float16": 1e-2}  # beside a CPU's
LOSS_SCALE = 2.0**12  # as in training: small gradients would be lost in float16


# Processes that see the GPU


@pytest.fixture(scope="module", autouse=True)
def visible_gpus():
    """What is started from here sees the GPUs that conftest.py hides."""
    before = os.environ["GPUS_BEFORE_TESTS"]
    with pytest.MonkeyPatch.context() as patch:
        if before == "all":
            patch.delenv("CUDA_VISIBLE_DEVICES")
        else:
            patch.setenv("CUDA_VISIBLE_DEVICES", before)
        yield


@functools.cache
def answer(work, *args):
    """What work(*args) returns in a process of its own; several tests may ask, it runs once."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        value = pool.submit(work, *args).result()
    print(f"{work.__name__}{args}: {value}")
    return value


@functools.cache
def no_gpu():
    """Why nothing can be tested on a GPU here; '' where it can."""
    if not torch.version.cuda:
        return "this torch is built without CUDA"
    if "PYTEST_XDIST_WORKER" in os.environ:
        return "on a GPU one at a time: python -m pytest tests/test_gpu.py"
    return "" if answer(torch.cuda.is_available) else "torch sees no GPU"


SLOW_ON_CPU = pytest.param("cpu", id="cpu", marks=pytest.mark.slow)


@pytest.fixture
def device(request):
    """The device of a test, "cuda" or "cpu"; the test is skipped where there is none."""
    if request.param == "cuda" and no_gpu():
        pytest.skip(no_gpu())
    return request.param


def on(*devices):
    return pytest.mark.parametrize("device", devices, indirect=True)


def set_up(device, **settings):
    """The settings of a small run on the device, in this process, which has no other use."""
    machine.matmul_rate = lambda *where: 1e12  # seconds of work
    changes = SMALL_MODEL | {"device": device, "data_dir": "nowhere", "samples": ""} | settings
    assert changes.keys() <= vars(train).keys()
    vars(train).update(changes)


def run_script(name, *args, **settings):
    done = script(name, *args, **settings)
    assert done.returncode == 0, done.stdout


# Losses and gradients beside those of float32 on the CPU


MODELS = {  # a recipe, and the fewest layers in which it is itself
    "default": ("", {"n_layer": 2}),
    "crammed": ("crammed.py", {"n_layer": 2}),
    "narrow": ("narrow.py", {"n_layer": 3, "n_narrow": 2}),
}
SIZES = {
    "cuda": {},  # the recipe's: 768 wide, 32,768 entries
    "cpu": {"vocab_size": 600, "n_head": 2, "n_embd": 32, "n_inner": 48},
}


def new_model(device, name):
    """A model of a recipe whose gradients are nowhere zero, on the CPU."""
    recipe, layers = MODELS[name]
    values = dict(vars(train))
    configure(values, [str(ROOT / "config" / recipe)] if recipe else [])
    values |= layers | SIZES[device] | {"zero_init": False}
    config = ModelConfig(**{f.name: values[f.name] for f in fields(ModelConfig)})
    torch.manual_seed(0)
    return MaskedLM(config)


def numerics(device, name):
    """{(a key of PRODUCTS, mode): (error of the loss, of the gradient by its norm), relative}.

    Of the model of a recipe, eager and compiled."""
    machine.pick(device, "auto")  # what suits our work there: TF32, no cuDNN
    model = new_model(device, name)
    rows = torch.randint(4, model.config.vocab_size, (8, 128))
    batch = train.draw_masks(any_words(model.config.vocab_size), rows, 38)

    def loss_and_gradient(where, products, mode):
        dtype, precision = PRODUCTS[products]
        torch.set_float32_matmul_precision(precision)
        net = copy.deepcopy(model).to(where)
        loss_fn = make_loss(net, torch.device(where), dtype)
        if mode == "compiled":
            torch.compiler.reset()
            loss_fn = torch.compile(loss_fn, dynamic=False)
        loss = loss_fn(*(tensor.to(where) for tensor in batch))["loss"] / (8 * 38)
        (loss * LOSS_SCALE).backward()
        gradient = torch.cat([p.grad.flatten().cpu() for p in net.parameters()]) / LOSS_SCALE
        return loss.item(), gradient

    wanted_loss, wanted_gradient = loss_and_gradient("cpu", "full", "eager")
    modes = ["eager", "compiled"] if device == "cuda" else ["eager"]
    errors = {}
    for products, mode in itertools.product(PRODUCTS, modes):
        loss, gradient = loss_and_gradient(device, products, mode)
        difference = (gradient - wanted_gradient).norm() / wanted_gradient.norm()
        errors[products, mode] = abs(loss / wanted_loss - 1), difference.item()
    return errors


WAYS = [
    ("cuda", "eager"),
    ("cuda", "compiled"),
    pytest.param("cpu", "eager", marks=pytest.mark.slow),  # a CPU compiles for minutes
]


@pytest.mark.parametrize(("device", "mode"), WAYS, indirect=["device"])
@pytest.mark.parametrize("products", PRODUCTS)
@pytest.mark.parametrize("model", MODELS)
def test_losses_and_gradients(device, model, products, mode):
    """Errors within the precision of products, and not those of a better one. NaN is neither.

    cuDNN's gradients of attention have been NaN on Hopper cards: machine.pick() does without it."""
    loss_error, gradient_error = answer(numerics, device, model)[products, mode]
    allowed = PRECISION[products]
    print(f"errors: loss {loss_error:.1e}, gradient {gradient_error:.1e}; allowed {allowed:.0e}")
    assert loss_error < allowed and gradient_error < allowed
    assert gradient_error > 1e-5 or PRODUCTS[products][0] == torch.float32  # a CPU has no TF32


# How often a step waits


def waits(device):
    """{(optimiser, dtype): (where each of five steps waits for the GPU, where one .item() does)}.

    As far as torch notices it: its debug mode sees copies to the host, not every call of CUDA."""

    def places(work, *args):
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            work(*args)
        torch.cuda.set_sync_debug_mode("default")
        waited = [one for one in said if "synchronizing CUDA operation" in str(one.message)]
        return [f"{one.filename}:{one.lineno}" for one in waited]

    found = {}
    for optimizer, dtype in itertools.product(("muon", "adamw"), DTYPES):
        # 4,096 tokens: from 3,073 on the embedding's gradient is computed in another way.
        rows = {"micro_batch": 32, "batch_start": 32, "batch_size": 64}
        set_up(device, optimizer=optimizer, dtype=dtype, **rows)
        run = bench.new_run()
        for _ in range(2):  # the optimisers make their states
            bench.step_of(run, 2)
        steps = [places(bench.step_of, run, 2) for _ in range(5)]
        found[optimizer, dtype] = steps, places(run.model.decoder.bias[0].item)
    return found


@on("cuda")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_a_step_waits_once(device, optimizer, dtype):
    """For loss and norm."""
    steps, one_item = answer(waits, device)[optimizer, dtype]
    assert len(one_item) == 1  # or nothing would be noticed
    assert [len(places) for places in steps] == [1] * 5, steps


# Whole runs


def graphs(device, data_dir, out_dir):
    """What a compiled run with ramp, mask decline, evaluations and saves compiles after its start.

    (its graphs, its breaks, how often what changes over the run has changed)."""
    changes = {"compile": True, "n_layer": 1, "max_steps": 12, "batch_size": 32}
    changes |= {"eval_rows": 21, "evals": 4, "dtype": "auto"}
    set_up(device, data_dir=data_dir, out_dir=out_dir, **changes)
    if device == "cpu":  # where inductor takes a minute; it is Dynamo that decides
        torch.compile = functools.partial(torch.compile, backend="eager")
    save = train.save
    saves = []

    def save_and_compile_no_more(run, log):
        saves.append(run.state.step)
        # From the first save on, before the first step, a new graph is an error, which names the
        # guard. fail_on_recompile_limit_hit would let seven of them pass.
        torch._dynamo.config.error_on_recompile = True
        return save(run, log)

    train.save = save_and_compile_no_more
    train.main()

    counters = torch._dynamo.utils.counters
    rows = runlog.read_log(out_dir)
    values = [
        {row.get(name) for row in rows} for name in ("batch_size", "mask_rate", "val_loss_15")
    ]
    changed = min(len(saves), *map(len, values))
    return counters["stats"]["unique_graphs"], len(counters["graph_break"]), changed


@on("cuda", SLOW_ON_CPU)
def test_nothing_is_compiled_after_the_start(device, data_dir, tmp_path):
    n_graphs, breaks, changed = answer(graphs, device, str(data_dir), str(tmp_path / "out"))
    assert n_graphs == 4 + 1  # training with four numbers of masks, and evaluation
    assert breaks == 0 and changed > 2


def halving(device, data_dir, out_dir):
    """A compiled run that may use 1.2 times what 256 rows need in eager steps, and asks for 1,024.

    The micro_batch it takes, its steps, the bytes that it has reserved and those that it may."""
    rows = {"micro_batch": 256, "batch_start": 256, "batch_size": 1024}
    rows |= {"mask_rate": 0.3, "mask_rate_end": 0.3}  # a shape, and not four, to compile anew
    set_up(device, data_dir=data_dir, out_dir=out_dir, **rows)
    run = bench.new_run()
    torch.cuda.reset_peak_memory_stats()
    bench.step_of(run, 2)
    needed = torch.cuda.max_memory_allocated()
    del run
    gc.collect()
    torch.cuda.empty_cache()
    card = torch.cuda.get_device_properties(device)
    # train.py keeps a twentieth free; inductor clears the cache where it times kernels.
    allowed = card.total_memory // 20 + card.L2_cache_size + 1.2 * needed
    torch.cuda.set_per_process_memory_fraction(allowed / card.total_memory)

    rows |= {"micro_batch": 1024, "batch_start": 1024}
    set_up(device, data_dir=data_dir, out_dir=out_dir, compile=True, max_steps=10, **rows)
    train.main()
    fitted = runlog.read_facts(out_dir)["settings"]["micro_batch"]
    steps = runlog.read_log(out_dir)[-1]["step"]
    return fitted, steps, torch.cuda.memory_reserved(), allowed


@on("cuda")
def test_micro_batch_halves_until_it_fits(device, data_dir, tmp_path):
    """A real allocator that refuses; test_train.py has one for the CPU."""
    fitted, steps, reserved, allowed = answer(halving, device, str(data_dir), str(tmp_path / "out"))
    assert 256 <= fitted < 1024
    assert steps == 10
    assert reserved <= allowed


def small_run(device, data_dir, out_dir, **settings):
    """The settings of a small run that logs each step."""
    changes = {"device": device, "data_dir": data_dir, "out_dir": out_dir, "log_every": 1}
    return SMALL_MODEL | changes | settings


def logged(out_dir):
    """{step: row of log.csv} with the losses of training."""
    return {row["step"]: row for row in runlog.read_log(out_dir) if "loss" in row}


def assert_same_course(out_dir, reference, tolerance=1e-3, of_weights=1e-2):
    """Same steps, same rows; losses within tolerance, norms of gradients within ten times that."""
    ours, theirs = logged(out_dir), logged(reference)
    assert ours.keys() == theirs.keys()
    off = [abs(ours[step]["loss"] / row["loss"] - 1) for step, row in theirs.items()]
    print(f"{len(off)} rows: losses at most {max(off):.1e} off, allowed {tolerance:.0e}")
    for step, row in theirs.items():
        assert ours[step]["tokens"] == row["tokens"]
        assert ours[step]["loss"] == pytest.approx(row["loss"], rel=tolerance), step
        assert ours[step]["grad_norm"] == pytest.approx(row["grad_norm"], rel=10 * tolerance), step
    weights, others = (load_file(path / "model.safetensors") for path in (out_dir, reference))
    assert weights.keys() == others.keys()
    for name, other in others.items():
        assert (weights[name] - other).norm() <= of_weights * other.norm(), name


STEPS = {"cuda": 120, "cpu": 20}  # of a run that is to be stopped before: a GPU is soon there


@pytest.fixture(scope="module")
def undisturbed(data_dir, tmp_path_factory):
    """A function of a device: the folder of a run of so many steps there."""

    @functools.cache
    def run(device):
        out = tmp_path_factory.mktemp(device) / "out"
        run_script("train.py", **small_run(device, data_dir, out, max_steps=STEPS[device]))
        return out

    return run


@on("cuda", SLOW_ON_CPU)
def test_a_stopped_run_goes_on_as_if_it_had_not_been(device, undisturbed, data_dir, tmp_path):
    """The optimisers' states are on the device again, or their step would fail."""
    out = tmp_path / "out"
    settings = small_run(device, data_dir, out, max_steps=STEPS[device])
    flags = [f"--{name}={value}" for name, value in settings.items()]
    process = subprocess.Popen([sys.executable, "train.py", *flags], cwd=ROOT)
    while process.poll() is None and max(logged(out), default=0) < 5:
        time.sleep(0.002)
    process.terminate()
    assert process.wait(60) == 0
    assert 5 <= max(logged(out)) < STEPS[device]
    run_script("train.py", **settings | {"init": "resume"})
    # Muon makes full steps of a gradient's smallest directions, noise included. On an H100 a matrix
    # was 1.9 % off, with losses within 1e-5; a resume without Muon's momentum is 42 % off (CPU).
    assert_same_course(out, undisturbed(device), of_weights=0.1)


@on("cuda", SLOW_ON_CPU)
def test_fine_tuning(device, undisturbed, glue_files, tmp_path, monkeypatch):
    """Padded pairs; the scores of a regression are those of the same fine-tuning on a CPU."""
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")  # products in full float32
    settings = {"tasks": "stsb", "seeds": 1, "epochs": 3, "glue_dir": glue_files[0]}
    settings |= {"glue_dropout": 0.0, "glue_lr": 1e-3, "dtype": "float32"}
    scores = []
    for where in (device, "cpu"):
        folder = shutil.copytree(undisturbed(device), tmp_path / f"model{len(scores)}")
        run_script("finetune_glue.py", model=folder, device=where, **settings)
        (run,) = glue.read_runs(folder).values()
        scores.append(run["scores"])
    ours, reference = scores
    print(f"{device} {ours}, cpu {reference}")
    assert ours == pytest.approx(reference, abs=3)  # of 100


@on("cuda", SLOW_ON_CPU)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_offload_is_the_plain_run(device, dtype, data_dir, tmp_path):
    """Several micro-batches a step, dropout, gradients that are nowhere zero."""
    settings = {"zero_init": False, "dropout": 0.1, "dtype": dtype}
    settings |= {"max_steps": 8, "batch_size": 24, "n_layer": 3}
    for offload in (False, True):
        out = tmp_path / f"{offload}"
        changes = small_run(device, data_dir, out, offload=offload, **settings)
        run_script("train.py", ROOT / "config/offload.py", **changes)
    tolerance = {"float32": 1e-3, "bfloat16": 1e-2}[dtype]  # of one card beside itself
    assert_same_course(tmp_path / "True", tmp_path / "False", tolerance, 10 * tolerance)
