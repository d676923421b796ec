"""Copies a topic into another one, which may have another partition count, another hub or another address. Each message
is stored once, although a copy may be killed at any moment and begun again (decision 0060).

A copy is made of pieces. A piece is a range of offsets of one source partition, and has a number. For each piece:

1. `records.CopyRecord`, in the registry of the target, is committed with the piece: its number, its range, and the
   offsets at which the partitions of the target ended. The commit expects the record as this process has read it.
2. The rows of the range are appended to the target under the origin (id of the copy, epoch: the number, sequence 0).

| what happens                                | what follows                                                          |
|---------------------------------------------|-----------------------------------------------------------------------|
| killed before step 1                        | nothing was done: the next process chooses a piece                    |
| killed after step 1, or during step 2       | the next process finds the piece in the record and sends it again:    |
|                                             | partitions that have its epoch know it as a duplicate (L4)            |
| killed after step 2                         | the same: all partitions know it                                      |
| the reply to the commit is lost             | the record is read again, and nothing was sent before its commit is   |
|                                             | known                                                                 |
| another process copies the same topics      | one of the two commits is refused, and its process ends with an error |
| a stopped process goes on later             | it sends a piece that is stored, or whose number is too small: the    |
|                                             | partition refuses it                                                  |
| the target has forgotten the producer       | it searches its batches from the recorded ends on (`Append.since`)    |
| another source has the id, such as an older | the mark of the last message that was copied differs (`mark_before`), |
| copy of its directory                       | and the copy ends with an error                                       |
| the target is restored from a backup        | the backup has no piece that its record does not have                 |
|                                             | (`pxrs.backup.partitions`)                                            |

The rows of a piece go to the same partitions each time, in the same order: `pieces.split` depends on nothing but the
rows, their offsets and the number of partitions. Pieces of one source partition are copied in the order of its offsets,
so messages with the same key keep their order. Memory is bounded by the size of one piece.
"""
