"""The message log in a local directory, shared by the processes of one machine.

A topic is a folder, a partition a folder in it, and a partition's messages lie in segment files. The code has two
halves, and the lower one imports nothing of the upper one (a test checks that):

- Below, `segments/`: frames in a sequence of segment files. Write, sync, cut, roll, and the scan after a crash. It
  knows nothing of offsets that follow each other, producers, retention or topics; a storage node needs this half alone.
- Above: `partition.py` (which offsets batches get, when to roll, what to publish) with `tail.py`, `append_lock.py`,
  `published.py` (the end up to which readers may read) and `recovery.py` (the end found again after a start of the
  machine); `reading.py` and `sealed.py` (reading by memory map); `index.py`, `start.py`, `reserved.py`,
  `producers_file.py` (the small files beside the segments); `topic.py` (`DirectoryTopic`) with `topic_folder.py` and
  `retaining.py`; `log.py` (`DirectoryLog`) with `topic_names.py` and `description.py`; `check.py` (`pxrs check`).

What it promises: an append is written, synced, published and acknowledged, in this order; nothing below the published
end is ever changed; a process may be killed, and the power may fail, at any moment. Start reading at `partition.py`,
whose docstring lists what happens on each failure.
"""
