#!/usr/bin/env bash
# Shows the whole road on real caches, in a folder that goes away: samples/demo.sh PATH/TO/kvzip
set -euo pipefail
kvzip_program=$(realpath "$1")
samples=$(dirname "$(realpath "$0")")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"

kvzip() { "$kvzip_program" "$@"; }
show() {
  printf '\n$ %s\n' "$*"
  "$@"
}

for sample in "$samples"/*.safetensors; do
  cache=$(basename "$sample")
  cp "$sample" .
  show kvzip compress "$cache"
  show kvzip inspect "$cache.kvz"
  show kvzip verify "$cache.kvz"
  show kvzip decompress "$cache.kvz" -o "restored-$cache"
  show kvzip bench --quick "$cache"

  show kvzip compress "$cache" --codec raw -o lossless.kvz
  show kvzip decompress lossless.kvz -o same.safetensors
  show cmp "$cache" same.safetensors
  echo "identical, byte for byte"
  rm lossless.kvz same.safetensors
done
show ls -l
