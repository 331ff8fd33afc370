#!/usr/bin/env bash
# The check on a GPU: bash benchmarks/gpu/check.sh OUT_DIR [--half 1|2] [SECTION ...]
#
# The whole takes five minutes at most, a half two and a half: --half 1 proves and measures the
# card's rates, --half 2 measures jobs, ours and torch's.
#
# Nothing is asked of any network. What Python lacks is installed from the wheels in the folder
# WHEELS (default: wheels beside OUT_DIR) into an environment of its own beside OUT_DIR; what is
# not there is done without, and the sections that need it say so. PYTHON names the interpreter that
# has torch. --emulated, as an argument, tries the check itself without a GPU.
set -uo pipefail

out=${1:?"usage: bash benchmarks/gpu/check.sh OUT_DIR [SECTION ...]"}
shift
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
case $out in -*)
	echo "usage: bash benchmarks/gpu/check.sh OUT_DIR [--half 1|2] [SECTION ...] [--emulated] [--seconds S]" >&2
	exit 2
	;;
esac
mkdir -p "$out" || exit 1
out=$(cd "$out" && pwd)
python=${PYTHON:-python3}
wheels=${WHEELS:-$out/../wheels}
venv=$out/../check-venv

# A cuDNN older than plans need, as an old torch brings, is shadowed by the wheel.
needed="numpy msgpack xxhash safetensors pyzmq cffi pycparser Pillow cupy-cuda13x nvidia-cuda-nvrtc
nvidia-cuda-runtime nvidia-cublas nvidia-cudnn-cu13>=9.19 nvidia-cudnn-jit-cu13
nvidia-cudnn-frontend cuda-bindings cuda-pathfinder"

lacking() {
	"$python" - $needed <<-'END'
		import importlib.metadata
		import sys

		for wanted in sys.argv[1:]:
		    name, _, least = wanted.partition(">=")
		    try:
		        here = importlib.metadata.version(name).split(".")
		    except importlib.metadata.PackageNotFoundError:
		        print(wanted)
		        continue
		    if least and [*map(int, here[:2])] < [*map(int, least.split("."))]:
		        print(wanted)
	END
}

# Packages of which there is a wheel; the rest is done without.
found=
for package in $(lacking); do
	name=${package%%>=*}
	if compgen -G "$wheels/${name//-/_}-*.whl" >/dev/null; then
		found+=" $package"
	else
		echo "check: going on without $package, of which no wheel is in $wheels (WHEELS)" >&2
	fi
done

if test -n "$found"; then
	if "$python" -m venv --system-site-packages --without-pip "$venv"; then
		# Of a Python that is an environment itself, a new one sees only the base.
		paths='import sysconfig; print(sysconfig.get_path("purelib"))'
		"$python" -c "$paths" >"$("$venv/bin/python" -c "$paths")/of_the_other.pth"
		python=$venv/bin/python
		install() {
			timeout 60 "$python" -m pip install --quiet --no-index --no-deps --no-compile \
				--disable-pip-version-check --find-links "$wheels" "$@"
		}
		install $found || for package in $found; do # one by one, where one of them cannot be
			install "$package" ||
				echo "check: $package cannot be installed; going on without it" >&2
		done
	else
		echo "check: no environment can be made at $venv; going on with what is here" >&2
	fi
fi

exec "$python" "$here/check.py" "$out" --spent $SECONDS "$@"
