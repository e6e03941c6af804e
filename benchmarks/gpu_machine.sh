#!/usr/bin/env bash
# Runs all work of a GPU machine with one command, from the bare tree:
#
#     benchmarks/gpu_machine.sh FOLDER PART:SECONDS[:ARGUMENTS] ...
#
# The machine has Python with torch and Triton, and a C compiler; the script fetches nothing and installs nothing into
# that Python. It unpacks missing packages from the wheels in $WHEELS (default: wheels/), if that folder exists. Each part
# ends within its SECONDS, and all parts within $LIMIT_S seconds of the start, if that is set.
#
#     look      the device, the versions, and whether everything can be imported
#     tests     of kernels and pinned memory, on the device     ARGUMENTS: pytest's
#     node      benchmarks.gpu.node, what `make gpu` runs       ARGUMENTS: its own
#     answers   tests/e2e/test_same_answer.py on the device     ARGUMENTS: pytest's
#     do        ARGUMENTS are a command for bash
#
# A part may be named PART.ANYTHING, so that it can come twice. FOLDER gets NAME.log of each. The exit status is 0 if all
# parts' are. $PYTHON (default: python3) runs it all.
set -u

[ $# -ge 2 ] || { sed -n '2,17s/^# \{0,1\}//p' "$0"; exit 2; }
mkdir -p "$1" && folder=$(cd "$1" && pwd) || exit 2
shift
cd "$(dirname "$0")/.." || exit 2
python=${PYTHON:-python3} wheels=${WHEELS:-wheels} place=$PWD/build/machine failed=0

if compgen -G "$wheels/*.whl" >/dev/null; then
    pip="$python -m pip install --quiet --disable-pip-version-check --no-cache-dir --no-index --no-deps --no-compile"
    $pip --upgrade --target "$place/site" "$wheels"/*.whl || exit 2
fi
export PYTHONPATH=$PWD:$place/site${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1

look() {
    echo "nvidia-smi -L; exec $python -P -m benchmarks.gpu.look"
}

pytest="$python -P -m pytest -q -W default --tb=short"

tests() {
    # Some versions of torch refuse products without the first, where tests ask for reproducible results.
    echo "export CUBLAS_WORKSPACE_CONFIG=:4096:8 OMP_NUM_THREADS=2; exec $pytest --maxfail=40 -m 'gpu or interpret'" \
        "tests/kernels/gpu tests/common/engine/{kv/test_{staging,quantised_staging},sampling/test_sampler}.py" \
        "--ignore=tests/kernels/gpu/test_launches.py $*"
}

node() {
    # A part may take a while to stop, and archives to write, in the time that is left.
    echo "exec $python -P -m benchmarks.gpu.node --out '$folder'" \
        "--time-limit-s $((seconds > 80 ? seconds - 40 : seconds / 2)) $*"
}

answers() {
    echo "export DIPTYCH_DEVICE=cuda HF_HUB_OFFLINE=1; exec $pytest -k 'not real_models'" \
        "tests/e2e/test_same_answer.py $*"
}

for part in "$@"; do
    IFS=: read -r name seconds arguments <<<"$part"
    if [ "${LIMIT_S:-0}" -gt 0 ]; then
        left=$((LIMIT_S - SECONDS - 10)) # to end by force, and to write
        [ "$seconds" -le "$left" ] || seconds=$left
    fi
    case ${name%%.*} in
        look | tests | answers | node) command=$("${name%%.*}" "$arguments") ;;
        do) command=$arguments ;;
        *) echo "there is no part $name" && failed=1 && continue ;;
    esac
    if [ "$seconds" -lt 1 ]; then
        echo "== $name: left out, the time is over" && failed=1 && continue
    fi
    echo "== $name, $seconds s at most: $command"
    began=$SECONDS
    timeout -k 10 "$seconds" bash -c "$command" >"$folder/$name.log" 2>&1 </dev/null
    status=$?
    tail -n "${TAIL:-60}" "$folder/$name.log"
    echo "== $name: exit status $status after $((SECONDS - began)) s"
    [ $status -eq 0 ] || failed=1
done
exit $failed
