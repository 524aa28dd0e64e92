"""``python -m moefuse``, for environments where the command is not on the path."""

from moefuse.cli import main

main()
