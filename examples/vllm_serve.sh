#!/usr/bin/env bash
# vLLM's OpenAI server on tierkv. Asks it about a document, kills it, starts another one and asks
# again: the document's KV is still there.
#
#   examples/vllm_serve.sh [--keep] [--model DIR_OR_ID]
#
# Starts a daemon if none is running, and ends it and the server at the end; --keep leaves both.
# Wants curl, and an environment that has vLLM and tierkv: PYTHON=... names its interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
port=${PORT:-8000}
keep="" model="" server="" daemon="" folder=$(mktemp -d -t tierkv-serve-XXXXXX)
export VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1} VLLM_NO_USAGE_STATS=1

while [ $# -gt 0 ]; do
  case $1 in
    --keep) keep=yes ;;
    --model) model=${2:?--model wants a folder or a hub id}; shift ;;
    *) echo "usage: $0 [--keep] [--model DIR_OR_ID]" >&2; exit 2 ;;
  esac
  shift
done

finish() {
  [ -z "$server" ] || kill -9 -- "-$server" 2>/dev/null || true
  [ -z "$daemon" ] || { kill "$daemon" && wait "$daemon"; } 2>/dev/null || true
  rm -rf "$folder"
}
trap finish EXIT
trap 'exit 1' INT TERM

start_daemon() {
  export TIERKV_SOCKET=$folder/tierkv.sock
  "$python" -m tierkv serve --set "server.socket=$TIERKV_SOCKET" --set "server.state_dir=$folder" \
    --set "arena.dir=$folder/arenas" --set metrics.tcp= --set device.bytes=1GiB \
    --set host.bytes=256MiB --set disk.bytes=1GiB 2>"$folder/daemon.log" &
  daemon=$!
  until "$python" -m tierkv status >/dev/null 2>&1; do
    kill -0 "$daemon" 2>/dev/null || { cat "$folder/daemon.log" >&2; exit 1; }
    sleep 0.2
  done
}

start_server() {
  # A process group of its own: all its processes are killed at once.
  set -m
  "$python" -m vllm.entrypoints.openai.api_server --model "$model" --served-model-name tierkv \
    --port "$port" --block-size 32 --enforce-eager --max-model-len 4096 \
    --enable-prompt-tokens-details --kv-transfer-config '{"kv_connector": "TierKVConnector",
      "kv_connector_module_path": "tierkv.integrations.vllm", "kv_role": "kv_both",
      "kv_load_failure_policy": "recompute"}' >"$folder/server.log" 2>&1 &
  server=$!
  set +m
  until curl --silent --fail --output /dev/null "http://127.0.0.1:$port/health"; do
    kill -0 "$server" 2>/dev/null || { tail -30 "$folder/server.log" >&2; exit 1; }
    sleep 0.5
  done
}

ask() {
  curl --silent --fail --header 'Content-Type: application/json' --data "@$folder/request.json" \
    "http://127.0.0.1:$port/v1/chat/completions" >"$folder/answer.json"
  "$python" - "$folder/answer.json" "$1" <<'END'
import json, sys
answer = json.load(open(sys.argv[1]))
usage = answer["usage"]
cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)
print(f"{sys.argv[2]}: {cached} of {usage['prompt_tokens']} tokens were cached;",
      repr(answer["choices"][0]["message"]["content"]))
END
}

blocks() {
  "$python" -m tierkv status --json |
    "$python" -c 'import json, sys; print(json.load(sys.stdin)["blocks"])'
}

# Blocks are saved in the background: those of the answer's prompt that were not cached, beside the
# $1 that the daemon had before.
wait_for_blocks() {
  local wanted
  wanted=$("$python" - "$folder/answer.json" "$1" <<'END'
import json, sys
usage = json.load(open(sys.argv[1]))["usage"]
cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)
print(int(sys.argv[2]) + usage["prompt_tokens"] // 32 - cached // 32)
END
  )
  for _ in $(seq 60); do
    [ "$(blocks)" -lt "$wanted" ] || return 0
    sleep 0.2
  done
  echo "tierkv does not have all of the document: see \"tierkv status\"" >&2
}

"$python" -m tierkv status >/dev/null 2>&1 || { echo "no daemon is running: starting one"; start_daemon; }
[ -n "$model" ] || model=$("$python" -m examples.smollm2_folder)
"$python" - >"$folder/request.json" <<'END'
import json
from pydoc_data.topics import topics
text = f"{topics['sequence-types'][:4000]}\n\nWhat is this text about?"
print(json.dumps({"model": "tierkv", "messages": [{"role": "user", "content": text}],
                  "max_tokens": 24, "temperature": 0}))
END

echo "starting vLLM's server"
start_server
before=$(blocks)
ask "first server"
wait_for_blocks "$before"
echo "kill -9 of the server, and another one"
kill -9 -- "-$server" && wait "$server" 2>/dev/null || true
start_server
ask "second server"

if [ -n "$keep" ]; then
  echo "left running: http://127.0.0.1:$port (kill -- -$server)${daemon:+, and its daemon (kill $daemon)}"
  echo "its log: $folder/server.log"
  trap - EXIT
  disown -a
fi
