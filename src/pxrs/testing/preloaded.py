"""What the fork server of `forked.py` imports before it forks. Nothing here may start a thread or open anything.

The client of etcd is left out: grpc must be imported after the fork."""

import typer.main

from pxrs.cli.app import app

typer.main.get_command(app)  # imports what only the building of commands imports
