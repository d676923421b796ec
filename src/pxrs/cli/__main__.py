"""`python -m pxrs.cli`, for where the `pxrs` script is not on the path."""

from pxrs.cli.app import main

main()
