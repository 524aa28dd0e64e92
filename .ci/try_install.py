"""Install the sdist and the wheel of a folder into an empty environment, and try each as a user would.

python .ci/try_install.py dist
"""

import os
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
CALL = """
import pathlib, sys, torch, moefuse
from moefuse.ops._core.select import resolve
assert pathlib.Path(moefuse.__file__).is_relative_to(sys.prefix), moefuse.__file__
x, router = torch.randn(5, 64), torch.randn(8, 64) / 8
stacks = torch.randn(8, 96, 64) / 8, torch.randn(8, 64, 48) / 7
got = moefuse.moe(x, router, *stacks, moefuse.Routing(top_k=2), residual=x)
want = moefuse.moe(*(t.double() for t in (x, router, *stacks)), moefuse.Routing(top_k=2), residual=x.double())
assert (got - want).abs().max() < 1e-4
print(resolve("experts", "cpu", torch.float32).backend)
"""


def run(*command: object, **more: str) -> str:
    """What a command prints, run far from the checkout and without its paths."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    with tempfile.TemporaryDirectory() as nowhere:
        done = subprocess.run([*map(str, command)], cwd=nowhere, env=clean | more, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}: exit {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def complete(wheel: Path) -> None:
    """Every file of the package is in the wheel, and the kernels beside them."""
    inside = set(zipfile.ZipFile(wheel).namelist())
    shipped = subprocess.run(["git", "ls-files", "src"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    lost = {name.removeprefix("src/") for name in shipped.split()} - inside
    assert not lost, f"{wheel.name} lacks {sorted(lost)}"
    assert any("backends/cpu/_core" in name for name in inside), f"{wheel.name} has no C++ kernels"


def main(folder: Path) -> None:
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    complete(wheel)
    with tarfile.open(sdist) as packed:
        strangers = [name for name in packed.getnames() if name.split("/")[1] in (".venv", "build", "tests")]
    assert not strangers, strangers
    with tempfile.TemporaryDirectory() as home:
        venv.create(home, with_pip=True)
        python, moefuse = Path(home, "bin", "python"), Path(home, "bin", "moefuse")
        pip, pins = (python, "-m", "pip", "install", "--quiet"), str(ROOT / "constraints.txt")
        again = (*pip, "--force-reinstall", "--no-deps", "--no-cache-dir")
        for package in (wheel, sdist):
            print(f"{package.name}: installing", flush=True)
            run(*(pip if package is wheel else again), package.resolve(), PIP_CONSTRAINT=pins)
            assert run(python, "-c", CALL).strip() == "cpu"
            assert "portable" in run(moefuse, "info")
            run(moefuse, "check", "--backend", "cpu")
        print(f"{sdist.name}: installing without a compiler", flush=True)
        run(*again, sdist.resolve(), PIP_CONSTRAINT=pins, CXX="/no/compiler")
        assert run(python, "-c", CALL).strip() == "reference"
        said = "".join(run(moefuse, "info", COLUMNS="2000"))
        assert "install a C++20 compiler" in said, said
        assert str(sdist.resolve()) in said, said
    print("installs and runs: wheel, sdist, sdist without a compiler")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
