"""The message log in a local directory.

`log.py` has `DirectoryLog`. A partition is a folder of segment files: `segment.py` and `index.py` are one of them,
`partition.py` appends and rolls, `reading.py` reads, `recovery.py` and `scanning.py` find the end after a crash,
`published.py` bounds what readers may see.
"""
