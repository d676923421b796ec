"""Upkeep: the work on a hub that no caller waits for. One open hub, the *janitor*, is elected to do it for all.

What a round does, and why a janitor that was frozen for an hour in the middle of it does no harm (`duties.py`):

| duty | needs the registry | a late or repeated step |
|---|---|---|
| retention | for topics with `keep_unread` | starts only move forward; the commit of `keep_unread` expects the gate |
| deletions of topics that were cut short | no | ids of topics are never used again |
| registry keys of topics whose deletion was cut short | yes | ids of topics are never used again |
| staged files that no manifest names | yes, on record | only files that were a day old before the manifests were read |
| readable files of groups without a leader | yes | rendered under a file lock, from a scan that follows the lock |

So upkeep is safe without the election (`election.py`). The election saves the work of doing upkeep in every process,
and gives one place to look at: who is the janitor, when did the last round end, what failed (`Hub.upkeep`, `pxrs
upkeep status`).

Who is elected: any open hub that has made a producer or a consumer of a topic with a retention, unless it was opened
with `upkeep=False`; a streaming query of Spark; or a process that was started for it, `pxrs upkeep`. One thread for
each such hub, started by the first producer or consumer; hubs that only read have none. A process that ends before its
thread has made a round, and finds no janitor, applies the retention of the topics that it sent to when its hub is
closed.

If the registry cannot be reached, is not there yet, or is not the one that the hub belongs to, nobody can be elected.
Then every such hub does the duties that need no registry: a full disk must not wait for a server.

Errors of a round are logged, at most once a minute for each subject, kept in the status, and never end the thread.

Start reading at `janitor.py` (the thread), then `duties.py`, `retention.py` and `deleted_topics.py` (the work).
"""
