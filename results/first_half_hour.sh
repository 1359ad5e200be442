#!/usr/bin/env bash
# What to ask a GPU first, in three stages of less than ten minutes; each leaves a log in out/first.
#
#   python prepare.py --max_tokens=20000000 --data_dir=data/first   # before, where there is a network
#   bash results/first_half_hour.sh 1                               # then 2, then 3
#
# 1: does it compute right, how fast is a step, and on what does it spend its time?
# 2: which change of the step pays? 3: a run stopped and resumed, GLUE, offload, the paper's recipe.
# Flags behind the stage go to train.py, bench.py and variants.py: --n_layer=2 is a rehearsal.
# GLUE=path/to/GLUE has its official files; without, they come from the Hub.
cd "$(dirname "$0")/.." || exit
stage=$1
case $stage in
[123]) shift ;;
*) echo "type: bash results/first_half_hour.sh 1, 2 or 3"; exit 2 ;;
esac
if [ ! -e data/first/meta.json ]; then
  echo "no data/first: type python prepare.py --max_tokens=20000000 --data_dir=data/first"
  exit 2
fi
set -o pipefail
out=out/first
mkdir -p $out
export PYTHONUNBUFFERED=1
data=--data_dir=data/first

# limit SECONDS COMMAND...: what hangs, or takes too long, does not keep the others waiting
limit() {
  echo "== ${*:2}"
  local begun=$SECONDS
  timeout --signal=INT --kill-after=30 "$@" 2>&1
  echo "== exit $?, $((SECONDS - begun)) s"
}

case $stage in
1)
  nvidia-smi
  limit 300 python -m pytest -q -rP -p no:cacheprovider tests/test_gpu.py
  limit 60 python results/rates.py
  limit 180 python bench.py $data --profile=True --trace=$out/trace.json "$@"
  ;;
2)
  # one number of masks: one shape to compile in each, not three
  flags=($data --mask_rate=0.25 --mask_rate_end=0.25 "$@")
  limit 80 python bench.py "${flags[@]}"
  limit 50 python bench.py --compile=False "${flags[@]}"
  limit 80 python bench.py --micro_batch=1024 "${flags[@]}"
  limit 80 python results/variants.py cudnn "${flags[@]}"
  limit 200 python results/variants.py autotune "${flags[@]}"
  ;;
3)
  run=(python train.py $data --out_dir=$out/run --budget_hours=0.05 --evals=6 "$@")
  limit 100 "${run[@]}"                # stopped by a Ctrl-C, as a user would ...
  limit 150 "${run[@]}" --init=resume  # ... and gone on with to the end of its budget
  limit 90 python finetune_glue.py --model=$out/run --glue_dir="$GLUE" --tasks=rte --seeds=1 --epochs=1
  limit 100 python bench.py config/offload.py $data --n_layer=8 --bench_steps=3 "$@"
  limit 80 python bench.py config/crammed.py $data "$@"
  ;;
esac | tee $out/log$stage.txt
