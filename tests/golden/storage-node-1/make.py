"""Makes `old`: the directory of a storage node as it was written before a node could be in doubt.

    python tests/golden/storage-node-1/make.py FOLDER

It was run with the code of that time, and is kept as it is. The node was killed: its record in the registry, which
`record.json` has, says nothing of a stop.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from pxrs import registry as registries
from pxrs.cluster.records import node_key
from pxrs.cluster.storage.identity import start
from pxrs.cluster.storage.node import NodeSettings
from tests.unit.cluster.stored import LEDGER, TOPIC, add, entry

folder = Path(sys.argv[1])
with registries.open("memory:") as registry:
    found = start(folder / "old", registry, "127.0.0.1:1", NodeSettings(segment_bytes=600, free_bytes_min=1))
    node = found.node
    for number in range(6):
        assert add(node, entry(number)) == [None]
    assert add(node, *(entry(number, f"{TOPIC}/1/0") for number in range(3))) == [None] * 3
    node.fence(f"{TOPIC}/1/0", 2)
    assert add(node, entry(0, f"{TOPIC}/2/7")) == [None]
    marks = dict(node.ledgers())
    node.settle()
    assert node.remove(f"{TOPIC}/2/7", marks[f"{TOPIC}/2/7"], has_partition=True)
    assert add(node, entry(6)) == [None]
    entry_found = registry.get(node_key(node.id))
    assert entry_found is not None
    record = {"node": node.id, "cluster": found.cluster, "record": json.loads(entry_found.value), "ledger": LEDGER}
    (folder / "record.json").write_text(json.dumps(record, indent=1) + "\n")
    node.close()
    found.directory.close()
(folder / "old" / "lock").unlink()
