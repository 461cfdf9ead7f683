#!/usr/bin/env bash
# The tables and figures of the ReDrafter paper (arXiv 2403.09919) in one command: trains, measures, and writes one page.
#
#   scripts/paper_tables.sh [demo|vicuna] [OUTPUT]
#
# demo: the embedded target, offline; of this conf=compare_demo alone takes most of an hour on two CPU cores. vicuna: Vicuna 7B
# and its data from the Hub, on the GPUs that `accelerate config` named. Interrupted, the same command goes on where it stopped.
# From the environment:
#   BIN          folder of `outrider` and `accelerate` (.venv/bin)
#   WIDTHS       beam widths of table 3, table 4 and figure 6; BEAM_LENGTH their length
#   BATCH_SIZES  of table 3 and figure 6
#   OVERRIDES    for every recipe, such as 'data.limit=100 train.steps=20'
#   LIMIT        prompts of table 3 and figure 6; THREADS its CPU threads for the demo, which has 2 everywhere
set -euo pipefail
cd "$(dirname "$0")/.."

subject=${1:-demo}
output=${2:-outputs/paper_$subject}
bin=${BIN:-.venv/bin}
read -ra widths <<< "${WIDTHS:-1 4 16 32}"
read -ra batch_sizes <<< "${BATCH_SIZES:-1 2 4 8}"
read -ra overrides <<< "${OVERRIDES:-}"
length=${BEAM_LENGTH:-5}

# evaluate FOLDER COMMAND...: a command that fails ends it all, unless it has finished the evaluation in FOLDER: then a drafter
# isn't lossless, which is for the report to tell.
not_lossless=0
evaluate() {
  local status=0 before
  before=$(mktemp)
  "${@:2}" || status=$?
  if ((status != 0)) && [[ ! $1/summary.json -nt $before ]]; then exit "$status"; fi
  rm "$before"
  ((status == 0)) || not_lossless=1
}

# train RECIPE FOLDER [OVERRIDE...]: a recipe's stages, each of which skips what is complete.
train() {
  echo "=== $1 -> $output/$2"
  evaluate "$output/$2/eval" "$bin/accelerate" launch "${launch[@]}" train.py "conf=$1" "output_dir=$output/$2" "${overrides[@]}" "${@:3}"
}

join() { local IFS=,; echo "$*"; }

beams=() grid=()
for width in "${widths[@]}"; do
  beams+=("{beam_width: $width, beam_length: $length}")
  for share in true false; do
    grid+=(--setting "{beam_width: $width, beam_length: $length, share_prefixes: $share}")
  done
done
for batch_size in "${batch_sizes[@]}"; do
  grid+=(--batch-size "$batch_size")
done
distillation="+variants={distilled: {train: {labels: distilled}}, text: {train: {labels: text}}}"

case $subject in
  demo)
    launch=(--quiet --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no)
    target=(--target models/demo_target --suite stdlib --threads "${THREADS:-2}")
    train compare_demo compare # table 1, figure 5
    train ablation_demo ablation "eval.settings=[$(join "${beams[@]}")]" # table 4
    folders=("$output/compare/eval" "$output/ablation/eval")
    drafter=$output/ablation/variants/distilled/drafter
    ;;
  vicuna)
    launch=()
    target=(--target lmsys/vicuna-7b-v1.3 --chat-template vicuna_v1.1 --tokenizer-option legacy=true --dtype bfloat16)
    target+=(--suite mt_bench --max-new-tokens 512)
    train redrafter_vicuna7b redrafter "$distillation" "eval.settings=[$(join "${beams[@]}")]"
    train medusa_vicuna7b medusa
    train eagle_vicuna7b eagle
    folders=("$output"/{redrafter,medusa,eagle}/eval)
    drafter=$output/redrafter/variants/distilled/drafter
    ;;
  *)
    echo "the subject is '$subject'; it must be demo or vicuna" >&2
    exit 2
    ;;
esac

echo "=== beam widths, batch sizes and shared prefixes -> $output/batches" # table 3, figure 6
evaluate "$output/batches" "$bin/outrider" eval "${target[@]}" --drafter "$drafter" "${grid[@]}" --limit "${LIMIT:-24}" --output "$output/batches"
"$bin/outrider" report "${folders[@]}" "$output/batches" --output "$output/report"
exit "$not_lossless"
