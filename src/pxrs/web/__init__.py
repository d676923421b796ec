"""`pxrs web`: a page that shows a hub, and lets those with a token act on it (docs/web.md).

| module | what it does |
|---|---|
| `topics` | the topics, their offsets and rates, looked at again and again at a bounded cost |
| `groups` | the groups, each read again only after its records have changed |
| `queues` | the queues and their items |
| `queries` | what the registry holds of streaming queries |
| `cluster` | the page of a cluster: its nodes, its ledgers and their copies |
| `history` | the newest events of the hub, kept in memory |
| `timeline` | pure: who owned which partition when, from events |
| `browse` | messages of a topic: by offset, time or key |
| `watching` | watches, also where they are not permitted |
| `observer` | one look at all of these for all requests of the same moment |
| `views` | what the pages show, as JSON |
| `actions` | what the page may change, and what each change would do |
| `plans` | the changes that were shown and wait for a confirmation |
| `access` | who may read and who may act |
| `guard` | which requests are answered at all; the headers of every answer |
| `routes` | the addresses of the page |
| `connections` | how many connections there are, and how long each may take |
| `serving` | the HTTP server and its limits |

Everything that the hub holds is shown as text by the scripts in `assets/`; no answer contains HTML made from data.
"""
