"""Install llama-cpp-python from a wheel that was compiled once.

python -m tools.llamacpp_wheel            install the kept wheel; fails where there is none
python -m tools.llamacpp_wheel --build    compile and keep it first, if need be: 5 to 15 minutes

Wheels are kept in $WEFT_WHEELS, by default ~/.cache/weft/wheels. The build runs on every x86-64 CPU
with AVX2, those with AMX too, on which the default one may crash (docs/llamacpp.md).
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
from pathlib import Path

VERSION = "0.3.36"
_X86 = (
    "-DGGML_NATIVE=OFF -DGGML_SSE42=ON -DGGML_AVX=ON -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON"
    " -DGGML_BMI2=ON -DLLAVA_BUILD=OFF"
)
_OTHERS = "-DGGML_NATIVE=OFF -DLLAVA_BUILD=OFF"


def kept(folder: Path) -> Path | None:
    """Return the wheel in a folder; None where there is none."""
    return next(iter(sorted(folder.glob(f"llama_cpp_python-{VERSION}-*.whl"))), None)


def build(folder: Path) -> None:
    """Compile the wheel into a folder."""
    flags = _X86 if platform.machine().lower() in ("x86_64", "amd64") else _OTHERS
    folder.mkdir(parents=True, exist_ok=True)
    wanted = ("--no-deps", "--no-binary", "llama-cpp-python", f"llama-cpp-python=={VERSION}")
    _pip("wheel", *wanted, "--wheel-dir", str(folder), CMAKE_ARGS=flags)


def main() -> int:
    """Do as the command line says; return the exit code."""
    parser = argparse.ArgumentParser(prog="tools.llamacpp_wheel", description=__doc__)
    parser.add_argument("--build", action="store_true", help="compile it where it is not there")
    given = parser.parse_args()
    folder = Path(os.environ.get("WEFT_WHEELS") or Path.home() / ".cache/weft/wheels")
    if kept(folder) is None and given.build:
        build(folder)
    wheel = kept(folder)
    if wheel is None:
        print(f"no llama-cpp-python {VERSION} in {folder}: --build compiles it", file=sys.stderr)
        return 1
    constraints = Path(__file__).resolve().parent.parent / "constraints.txt"
    _pip("install", "--quiet", "--constraint", str(constraints), str(wheel))
    return 0


def _pip(*given: str, **environment: str) -> None:
    command = [sys.executable, "-m", "pip", *given]
    subprocess.run(command, check=True, env={**os.environ, **environment})


if __name__ == "__main__":
    sys.exit(main())
