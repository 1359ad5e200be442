"""What a GPU has to show: numerics, compiling, memory, resumes, fine-tuning, offload.

    python -m pytest -rP tests/test_gpu.py   # what each saw; not with -n: they would share the GPU

A check is a script as a user starts it, or a function in a process of its own. All passed on an
H100 on 2026-11-26; since then they were joined. TEST_DEVICE=cpu rehearses most of it on a CPU.
"""

import functools
import gc
import itertools
import multiprocessing
import os
import shutil
import subprocess
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from conftest import ROOT, SMALL_MODEL, assert_same_course, command, flags, typed, wait_for_step

import bench
import train
from nanocram import facts, glue, machine, runlog
from nanocram.settings import configure

DEVICE = os.environ.get("TEST_DEVICE", "cuda")
# Training in float32 has products of "high" precision, TF32 on a GPU: by emulation on a CPU that
# gives gradients that are 1.1e-3 off in the default and 4.5e-3 in crammed BERT.
PRODUCTS = {  # and the error that is allowed beside full ones on a CPU
    "full": (torch.float32, "highest", 1e-4),
    "float32": (torch.float32, "high", 3e-2),
    "bfloat16": (torch.bfloat16, "high", 5e-2),
    "float16": (torch.float16, "high", 1e-2),
}
LOSS_SCALE = 2.0**12  # as in training: small gradients would be lost in float16
MODELS = {  # a recipe, and the fewest layers in which it is itself
    "default": ["--n_layer=2"],
    "crammed": ["config/crammed.py", "--n_layer=2"],
    "narrow": ["config/narrow.py", "--n_layer=3", "--n_narrow=2"],
}
# Of the recipe: 768 wide, 32,768 entries; smaller on a CPU.
SIZES = {} if DEVICE == "cuda" else {"vocab_size": 600, "n_head": 2, "n_embd": 32, "n_inner": 48}
MODES = ["eager", "compiled"] if DEVICE == "cuda" else ["eager"]  # a CPU compiles for minutes
STEPS = 120 if DEVICE == "cuda" else 20  # that are to be stopped before: a GPU is soon there


@functools.cache
def answer(work, *args):
    """What work(*args) returns in a process of its own; several tests may ask, it runs once."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        value = pool.submit(work, *args).result()
    print(f"{work.__name__}{args}: {value}")
    return value


@pytest.fixture(scope="module", autouse=True)
def see_gpus():
    """What is started here sees the GPUs that conftest.py hides."""
    before = os.environ["GPUS_BEFORE_TESTS"]
    is_alone = "PYTEST_XDIST_WORKER" not in os.environ
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", before)
        if before == "all":
            patch.delenv("CUDA_VISIBLE_DEVICES")
        has_gpu = torch.version.cuda and is_alone and answer(torch.cuda.is_available)
        if DEVICE == "cuda" and not has_gpu:
            pytest.skip("torch sees no GPU, or shares it (-n)")
        yield


def small_run(data_dir, out_dir, **settings):
    """The settings of a small run that logs each step."""
    changes = {"device": DEVICE, "data_dir": data_dir, "out_dir": out_dir, "log_every": 1}
    return SMALL_MODEL | changes | settings


def set_up(data_dir, out_dir, **settings):
    """Set those of a small run in this process, which has no other use."""
    machine.matmul_rate = lambda *where: 1e12  # seconds of work
    configure(vars(train), flags(**small_run(data_dir, out_dir, samples="", **settings)))


@machine.training_kernels()
def numerics(name):
    """{(products, mode): (error of the loss, of the gradient by its norm)} of a recipe's model."""
    configure(vars(train), [*MODELS[name], *flags(**SIZES, zero_init=False)])
    rows = bench.RandomRows(128, torch.device("cpu"))

    def loss_and_gradient(where, products, mode):
        dtype, precision, _ = PRODUCTS[products]
        train.compile = mode == "compiled"
        run = train.Run(rows, {}, None, torch.device(where), dtype)  # the same weights each time
        batch = train.masked_batch(run, 0, 8, (128, 38))
        with machine.float32_products(precision):
            loss = run.loss_fn(*(tensor.to(where) for tensor in batch))["loss"]
            (loss * LOSS_SCALE).backward()
        gradient = torch.cat([p.grad.flatten().cpu() for p in run.model.parameters()]) / LOSS_SCALE
        return loss.item(), gradient

    wanted_loss, wanted_gradient = loss_and_gradient("cpu", "full", "eager")
    errors = {}
    for products, mode in itertools.product(PRODUCTS, MODES):
        loss, gradient = loss_and_gradient(DEVICE, products, mode)
        difference = (gradient - wanted_gradient).norm() / wanted_gradient.norm()
        errors[products, mode] = abs(loss / wanted_loss - 1), difference.item()
    return errors


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("products", PRODUCTS)
@pytest.mark.parametrize("model", MODELS)
def test_losses_and_gradients(model, products, mode):
    """Not those of a better precision. cuDNN's attention has given NaN on Hopper cards."""
    loss_error, gradient_error = answer(numerics, model)[products, mode]
    dtype, _, allowed = PRODUCTS[products]
    print(f"errors: loss {loss_error:.1e}, gradient {gradient_error:.1e}; allowed {allowed:.0e}")
    assert loss_error < allowed and gradient_error < allowed
    assert gradient_error > 1e-5 or dtype == torch.float32  # a CPU has no TF32


def graphs(data_dir, out_dir):
    """(graphs, breaks) of a compiled run with ramp, mask decline, evaluations and saves."""
    changes = {"compile": True, "n_layer": 1, "max_steps": 12, "eval_rows": 21, "evals": 4}
    changes |= {"batch_start": 256, "batch_size": 512, "dtype": "auto", "micro_batch": 0}
    set_up(data_dir, out_dir, **changes)
    if DEVICE == "cpu":  # where inductor takes a minute; it is Dynamo that decides
        torch.compile = functools.partial(torch.compile, backend="eager")
    save = train.save

    def save_and_compile_no_more(run, log):
        # From the first save on, before the first step, a new graph is an error, which names the
        # guard. fail_on_recompile_limit_hit would let seven of them pass.
        torch._dynamo.config.error_on_recompile = True
        return save(run, log)

    train.save = save_and_compile_no_more
    train.main()
    counters = torch._dynamo.utils.counters
    return counters["stats"]["unique_graphs"], len(counters["graph_break"])


def test_nothing_is_compiled_after_the_start(data_dir, tmp_path):
    n_graphs, breaks = answer(graphs, str(data_dir), str(tmp_path / "out"))
    sizes = 2 if DEVICE == "cuda" else 1  # of passes: a GPU has room for 512 rows
    assert n_graphs == 4 * sizes + 1  # training with four numbers of masks, and evaluation
    assert breaks == 0


def halving(data_dir, out_dir):
    """micro_batch and steps of a run with room for 1.2 times 256 rows."""
    rows = {"micro_batch": 256, "batch_start": 256, "batch_size": 1024}
    rows |= {"mask_rate": 0.3, "mask_rate_end": 0.3}  # a shape, and not four, to compile anew
    set_up(data_dir, out_dir, **rows)
    run = bench.new_run()
    torch.cuda.reset_peak_memory_stats()
    bench.step_of(run, 2)
    needed = torch.cuda.max_memory_allocated()
    del run
    gc.collect()
    torch.cuda.empty_cache()
    card = torch.cuda.get_device_properties(DEVICE)
    # train.py takes 90 % of what is free; inductor clears the cache where it times kernels
    taken = 0.9 * torch.cuda.mem_get_info()[0] - 1.2 * needed - card.L2_cache_size
    taken = torch.empty(int(taken), dtype=torch.uint8, device=DEVICE)

    rows |= {"micro_batch": 1024, "batch_start": 1024}
    set_up(data_dir, out_dir, compile=True, max_steps=10, **rows)
    train.main()
    return facts.read_facts(out_dir)["rows_per_pass"], runlog.read_log(out_dir)[-1]["step"]


@pytest.mark.skipif(DEVICE == "cpu", reason="there is no such thing on a CPU")
def test_micro_batch_halves_until_it_fits(data_dir, tmp_path):
    """A real allocator that refuses."""
    fitted, steps = answer(halving, str(data_dir), str(tmp_path / "out"))
    assert 256 <= fitted < 1024 and steps == 10


@pytest.fixture(scope="module")
def undisturbed(data_dir, tmp_path_factory):
    """The folder of a run of so many steps."""
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    typed("train.py", **small_run(data_dir, out, max_steps=STEPS))
    return out


def test_a_stopped_run_goes_on_as_if_it_had_not_been(undisturbed, data_dir, tmp_path):
    """The optimisers' states are on the device again, or their step would fail."""
    out = tmp_path / "out"
    settings = small_run(data_dir, out, max_steps=STEPS)
    process = subprocess.Popen(command("train.py", **settings), cwd=ROOT)
    wait_for_step(out, 5, process, 0.002)
    process.terminate()
    assert process.wait() == 130
    assert 5 <= runlog.read_log(out)[-1]["step"] < STEPS
    typed("train.py", **settings | {"init": "resume"})
    # Muon makes full steps of a gradient's smallest directions, noise included. On an H100 a matrix
    # was 1.9 % off, with losses within 1e-5; a resume without Muon's momentum is 42 % off (CPU).
    assert_same_course(out, undisturbed, 1e-3, of_weights=0.1)


def test_fine_tuning(undisturbed, glue_files, tmp_path, monkeypatch):
    """Padded pairs; the scores of a regression are those of the same fine-tuning on a CPU."""
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")  # products in full float32
    settings = {"tasks": "stsb", "seeds": 1, "epochs": 3, "glue_dir": glue_files[0]}
    settings |= {"glue_dropout": 0.0, "glue_lr": 1e-3, "dtype": "float32"}
    scores = []
    for where in (DEVICE, "cpu"):
        folder = shutil.copytree(undisturbed, tmp_path / f"model{len(scores)}")
        typed("finetune_glue.py", model=folder, device=where, **settings)
        (run,) = glue.read_runs(folder).values()
        scores.append(run["scores"])
    ours, reference = scores
    print(f"{DEVICE} {ours}, cpu {reference}")
    assert ours == pytest.approx(reference, abs=3)  # of 100


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_offload_is_the_plain_run(dtype, data_dir, tmp_path):
    """Several micro-batches a step, dropout, gradients that are nowhere zero."""
    settings = {"zero_init": False, "dropout": 0.1, "dtype": dtype}
    settings |= {"max_steps": 8, "batch_size": 24, "n_layer": 3}
    for offload in (False, True):
        out = tmp_path / f"{offload}"
        changes = small_run(data_dir, out, offload=offload, **settings)
        typed("train.py", ROOT / "config/offload.py", **changes)
    tolerance = {"float32": 1e-3, "bfloat16": 1e-2}[dtype]  # of one card beside itself
    assert_same_course(tmp_path / "True", tmp_path / "False", tolerance, 10 * tolerance)
