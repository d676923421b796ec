"""`pxrs new`: a project to start from. `command.py` writes it from the files in `templates/`."""
