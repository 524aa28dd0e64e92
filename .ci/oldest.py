"""Print a pip constraint for the oldest version of each package that pyproject.toml allows at run time, torch excepted.

torch's oldest is gigabytes of CUDA and is tried on a GPU; here the one of constraints.txt serves.
"""

import re
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
extras = project["optional-dependencies"]
wanted = [*project["dependencies"], *(row for name in extras if name != "dev" for row in extras[name])]
for requirement in wanted:
    name, oldest = re.match(r"([\w-]+)>=([\d.]+)", requirement).groups()
    if name != "torch":
        print(f"{name}=={oldest}")
