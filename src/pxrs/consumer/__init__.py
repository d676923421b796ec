"""Reading a topic, or any other source, as a member of a group.

What the package promises: every message of the partitions that this member owns is handed out, in order within its
partition, at least once; nothing is handed out that another member may own (G8); a checkpoint covers only messages that
are done. docs/groups.md says it for users.

Start with `consumer.py`, the surface. It is made of these parts, each of which uses only those above it:

    lifetime      whether the consumer may be used: not after `close`, not after a fork
    changes       how a thread that waits learns that it should look again
    lanes         which partitions are owned, and which of them is read next
    read_ahead    what was read and not handed out yet; reading itself, also in the background
    readers       which thread reads; a second one is refused
    states        the table: what each call does with the messages in hand
    settling      applies the table: done, handed out again, or decided by a transaction
    hand_out      finding the next messages and taking them in hand
    events        events of the member, and the user's callbacks
    loops         `for message in inbox`, `poll`, `batches`
    runner        `run`: a handler on several threads, and what happens if it raises
    dead_letters  where messages go that a handler failed on
    transactions  a checkpoint as the last statement of a transaction in the user's own database
    settings      the arguments of the constructor, checked

Threads, and what they hold:

    the user's thread      reads: finds, takes in hand, counts as done. Holds `Lanes.lock` for a few steps at a time,
                           never while the source is read or the registry is called
    handlers' threads      in `run`: take messages of their own lane in hand and count them as done
    the member's thread    `pxrs.group.member`: assigns and removes lanes through `events`, writes checkpoints. Holds
                           the member's mutex, and takes `Lanes.lock` inside of it; nobody takes them the other way
                           round
    the read-ahead thread  `ReadAhead`: only while there is something to read ahead; holds no lock while it reads
"""
