#!/usr/bin/env bash
# The first half hour on a GPU: tests, certificates, speed, a killed recipe; a JSON and a page in $OUT (gpu_first/).
#   scripts/gpu/first_half_hour.sh                  # 25 minutes at most; without a GPU the tiny form, in two
#   scripts/gpu/first_half_hour.sh --minutes 9.5    # only parts that end in time; run it again to resume
#   scripts/gpu/first_half_hour.sh --only decode    # only parts whose names begin like this
set -euo pipefail
cd "$(dirname "$0")/../.."
export HF_HUB_OFFLINE=1 WANDB_MODE=disabled PYTHONUNBUFFERED=1
exec "${PYTHON:-python3}" scripts/gpu/half_hour.py "$@"
