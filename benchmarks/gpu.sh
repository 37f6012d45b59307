#!/usr/bin/env bash
# Run all benchmarks of a GPU, in at most ten minutes. The most important ones come first; late ones are skipped.
#
#     bash benchmarks/gpu.sh            from the repository's root; results go to $OUT, by default benchmarks/results/
#
# It needs only torch >= 2.11, torchvision, transformers, numpy, pyarrow, msgpack and pillow. Each section has a time
# limit. If one fails, the others still run, and the summary at the end lists the failures. SECTIONS="base losses" runs
# only these two; DEVICE=cpu GPU_SH_TINY=1 runs everything at tiny sizes on any machine.
set -u
cd "$(dirname "$0")/.."
DEVICE=${DEVICE:-cuda}
TINY=${GPU_SH_TINY:-}
PYTHON=${PYTHON:-python3}
OUT=${OUT:-benchmarks/results/$(date +%F)-gpu}
BUDGET=${BUDGET:-590} # total seconds
mkdir -p "$OUT"
# A detector's id contains the version of the package vlbert, which may not be installed.
METADATA=$(mktemp -d)
trap 'rm -rf "$METADATA"' EXIT
mkdir "$METADATA/vlbert.dist-info"
printf 'Metadata-Version: 2.1\nName: vlbert\nVersion: %s\n' "$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)" \
    > "$METADATA/vlbert.dist-info/METADATA"
export PYTHONPATH=$METADATA${PYTHONPATH:+:$PYTHONPATH}
SUMMARY=$OUT/summary.txt
: > "$SUMMARY"

# section NAME SECONDS COMMAND...: run a command with its output in NAME.txt, and add a line to the summary.
section() {
    local name=$1 limit=$2 left=$((BUDGET - SECONDS)) start=$SECONDS status
    shift 2
    [[ -n ${SECTIONS:-} && " $SECTIONS " != *" $name "* ]] && return 0
    if ((left < 10)); then
        echo "$name: skipped, no time left" | tee -a "$SUMMARY"
        return 1
    fi
    echo "== $name"
    timeout --kill-after=5 $((limit < left ? limit : left)) "$@" > "$OUT/$name.txt" 2>&1
    status=$?
    cat "$OUT/$name.txt"
    case $status in
        0) echo "$name: done in $((SECONDS - start)) s" ;;
        124 | 137) echo "$name: failed, exceeded $limit s" ;;
        *) echo "$name: failed with status $status: $(tail -n 1 "$OUT/$name.txt")" ;;
    esac | tee -a "$SUMMARY"
    return $status
}

# step NAME SECONDS RECIPE PAIRS ARGUMENTS...: measure a training step, with its table and JSON.
step() {
    local name=$1 limit=$2 recipe=$3 pairs=$4
    shift 4
    section "$name" "$limit" "$PYTHON" -m benchmarks.train_step --device "$DEVICE" --recipe "$recipe" --pairs "$pairs" \
        --batches 2 --rounds 3 --json "$OUT/$name.json" "$@" "${SMALL[@]}"
}

SMALL=()
PAIRS=128 HALF=64 FEW=4 STEPS=50 WORKERS=$(($(nproc) > 2 ? $(nproc) - 2 : 2))
DETECT=(--device "$DEVICE" --batch 8 --count 8 --rounds 2)
if [[ -n $TINY ]]; then
    SMALL=(--rounds 1 --steps 1 --model.layers JJ --model.hidden_size 32 --model.num_heads 2
        --model.intermediate_size 64 --model.geometry_channels 32 --model.regions.resnet.blocks 1 1 1 1
        --model.regions.resnet.width 4 --model.regions.roi_size 4 --model.regions.short_side 48
        --model.regions.long_side 80 --model.region_hidden_size None)
    PAIRS=2 HALF=2 FEW=2 STEPS=5 WORKERS=1
    DETECT=(--preset demo --count 1 --rounds 1)
fi

section facts 60 "$PYTHON" - "$DEVICE" << 'FACTS'
import importlib.metadata, os, sys, torch
for package in ("torch", "torchvision", "transformers", "numpy", "pyarrow", "msgpack", "pillow"):
    print(package, importlib.metadata.version(package))
print("cores", os.cpu_count())
if sys.argv[1] == "cuda":
    device = torch.cuda.get_device_properties(0)
    print(device.name, f"{device.total_memory / 1e9:.0f} GB", "CUDA", torch.version.cuda, "cuDNN", torch.backends.cudnn.version())
FACTS

section check 80 "$PYTHON" -m benchmarks.train_step --device "$DEVICE" --check --precision fp32,tf32,bf16 \
    --json "$OUT/check.json" "${SMALL[@]}"

step base 130 pretrain_vlbert "$PAIRS" --workers "$WORKERS" ||
    step base-half 90 pretrain_vlbert "$HALF" --workers "$WORKERS"
# A rehearsal of the same step, with the measured times next to the predicted ones.
CARD=$(grep -oiE 'h100|h200|a100|l40s|rtx 4090' "$OUT/facts.txt" | head -n 1 | tr -d ' ' | tr '[:upper:]' '[:lower:]')
section predicted 60 "$PYTHON" -m benchmarks.rehearsal --device "${CARD:-h100}" --pairs "$PAIRS" \
    --measured "$OUT/base.json" --json "$OUT/predicted.json" "${SMALL[@]:4}"
step base-precomputed 100 pretrain_vlbert "$PAIRS" --features precomputed --precision bf16,tf32,fp32
section losses 180 "$PYTHON" -m benchmarks.train_step --device "$DEVICE" --losses "$STEPS" --pairs "$FEW" \
    --workers "$WORKERS" --json "$OUT/losses.json" "${SMALL[@]}"
step large 80 pretrain_vlbert "$HALF" --size large --no-plain
step large-precomputed 40 pretrain_vlbert "$PAIRS" --size large --features precomputed --no-plain
step unicoder-vl 60 pretrain_unicoder_vl "$PAIRS" --precision bf16,fp32 --no-plain
step vilbert 60 pretrain_vilbert "$PAIRS" --precision bf16,fp32 --no-plain
step base-activation-checkpointing 90 pretrain_vlbert "$PAIRS" --no-plain --activation_checkpointing

# The tests that need a GPU. Their conftest.py is not used, because it needs packages that may be missing here.
if "$PYTHON" -c "import hypothesis, pytest" 2> "$OUT/tests.txt"; then
    section tests 60 "$PYTHON" -m pytest --noconftest -o addopts= -p no:cacheprovider -q -rs -k "a_gpu_" \
        tests/detectors/test_faster_rcnn.py tests/detectors/test_resnet.py tests/vlbert/test_train_step.py
else
    echo "tests: skipped, pytest or hypothesis is not installed" | tee -a "$SUMMARY"
fi

section detect 90 "$PYTHON" -m benchmarks.detect "${DETECT[@]}" --json "$OUT/detect.json"
step base-precomputed-compile 60 pretrain_vlbert "$PAIRS" --features precomputed --precision bf16 --no-plain --compile
step base-compile 150 pretrain_vlbert "$HALF" --precision bf16 --no-plain --compile

echo
echo "== summary ($SECONDS s, results in $OUT)"
cat "$SUMMARY"
! grep -q ": failed" "$SUMMARY"
