#!/bin/sh
# Build the app's image and try it: ingest, ask over HTTP, kill, start again with the same volume; no network while it runs.
#   deploy/app/check.sh [OPTIONS OF `build`]        (ENGINE=docker: that one; else podman where it is there)
# Where no registry is reached, make a base first (as root), and name it:
#   debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates bookworm base
#   tar -C base -c . | podman import - ragblend-base
#   deploy/app/check.sh --build-arg BASE=ragblend-base
set -eu
cd "$(dirname "$0")/../.."
engine=${ENGINE:-$(command -v podman || echo docker)}
if ! "$engine" info >/dev/null 2>&1; then
    echo "skipped: neither podman nor docker runs here"
    exit 0
fi
# podman's own format has no health check, and it does not look for this file.
case $engine in *podman) set -- --format docker --ignorefile deploy/app/Dockerfile.dockerignore "$@" ;; esac
"$engine" build "$@" -f deploy/app/Dockerfile -t ragblend .

name=ragblend-check-$$
trap '"$engine" rm -f "$name" >/dev/null 2>&1; "$engine" volume rm "$name" >/dev/null' EXIT
run() {
    "$engine" run -v "$name:/data" --network none --cap-drop ALL --security-opt no-new-privileges "$@"
}
key=$(run --rm ragblend keys add --owner check | head -n 1)
run --rm -v "$PWD/app/samples/documents:/documents:ro" ragblend ingest /documents
for start in first second; do
    run --detach --name "$name" ragblend serve --host 0.0.0.0 --port 7860
    "$engine" exec -i "$name" python3 - "$key" <<'ASK'
import json, sys, time, urllib.request

def call(path, body=None):
    said = {"Authorization": f"Bearer {sys.argv[1]}", "Content-Type": "application/json"}
    url = f"http://127.0.0.1:7860{path}"
    return json.load(urllib.request.urlopen(urllib.request.Request(url, body and json.dumps(body).encode(), said)))

for second in range(120):
    try:
        if call("/healthz")["status"] == "ok":
            break
    except OSError:
        pass
    time.sleep(1)
assert call("/v1/documents")["total"] == 8
answer = call("/v1/rag/ask", {"question": "What is the cat in the engine shed called?"})
print(answer["answer"])
assert "Ballast" in answer["answer"]
ASK
    "$engine" kill "$name" && "$engine" rm "$name"
    echo "The $start start has all documents."
done
"$engine" run --rm ragblend --version 2>&1 | grep "No volume is named"
run --rm ragblend --version 2>&1 | grep "No volume is named" && exit 1
"$engine" run --rm --entrypoint id ragblend -u | grep -x 1000
