#!/usr/bin/env bash
# Start one member of a run in a bucket, on all GPUs of this machine. Words given to it are flags of `diloco train`:
#   BUCKET=s3://my-bucket/run-1 MEMBER=east examples/clusters/member.sh --model 1b --data hf:my-org/my-text
# The same command brings the member back after a preemption.
set -euo pipefail
: "${BUCKET:?give the bucket that all members share, as s3://my-bucket/run-1}"
: "${MEMBER:?give this member a name of its own, as east}"
devices="${DEVICES:-$(nvidia-smi --list-gpus | wc -l)}"
words=(train --bucket "$BUCKET" --member "$MEMBER" --shards "$devices" "$@")
if [ "$devices" -gt 1 ]; then
    exec torchrun --standalone --nproc_per_node "$devices" -m diloco "${words[@]}"
fi
exec diloco "${words[@]}"
