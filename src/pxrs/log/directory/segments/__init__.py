"""Frames in a sequence of segment files: the lower half of the log in a directory.

A folder holds segment files `<base>.log`. A base is a number of 20 digits that rises from file to file; frames
(`pxrs.log.batch`, docs/format.md) follow each other in a file without space between them, and appends go to the file
with the highest base. That is all this package knows. It knows nothing of topics, of which offsets follow each other,
of producers, or of retention: a caller gives these rules as functions (`FrameCheck`, `is_later`). The frames of several
ledgers can lie interleaved in one sequence, and then one sync makes them all durable (C5). A unit test keeps this
package from importing anything of the upper half.

What it promises, if one writer at a time uses a folder and follows the order write, sync, acknowledge:

- What was synced is found again after a crash: `scan` walks the frames of the last file and checks every checksum.
- A torn append, which a crash cut in the middle of a write, is told from damage. A whole frame behind the place that
  begins a later append (`Header.follows` is 0) proves that the place was synced before, because each append is synced
  before the next one is written. Then `OpenSegment.keep_whole` raises DamagedFrame and cuts nothing. Otherwise it cuts
  the torn append off.
- A segment is complete before the next one exists: sync the last file, then call `next_segment`.

A storage node that syncs several appends together must give all frames that share a sync one run of `follows` numbers:
0 for the first of them, then 1, 2, 3...

Where to start reading: `writing.py` (`OpenSegment`: write, sync, cut, recover; `next_segment`: roll), then
`scanning.py`. `frames.py` walks headers; `files.py` names, lists, reads and writes files.
"""
