#!/usr/bin/env bash
# The first half hour on a GPU: tests, certificates, speed, a recipe that is killed; one JSON and one page in $OUT (gpu_first/).
#   scripts/gpu/first_half_hour.sh                  # 25 minutes at most; without a card the tiny form, in two
#   scripts/gpu/first_half_hour.sh --minutes 9.5    # only parts that end in time; the same command again goes on
#   scripts/gpu/first_half_hour.sh --only decode    # the parts whose names begin so
set -euo pipefail
cd "$(dirname "$0")/../.."
export HF_HUB_OFFLINE=1 WANDB_MODE=disabled PYTHONUNBUFFERED=1
exec "${PYTHON:-python3}" scripts/gpu/half_hour.py "$@"
