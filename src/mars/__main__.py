"""``python -m mars``: for launchers that start modules."""

from mars.cli import main

main()
