"""Who may do what on a server: tokens, grants, and the decision about each call.

| module | what it does |
|---|---|
| `permissions` | grants, such as `topic:orders=read`, and what each includes |
| `keys` | which keys of the registry a caller may read and write |
| `decisions` | what each call of docs/wire.md needs |
| `names` | the names that belong to the ids of topics and queues |
| `tokens` | the tokens file: hashes of tokens, certificates, and their grants |
| `gate` | what the server asks: who calls, whether the call is permitted, what its answer may show |
| `capabilities` | tokens for the executors of one query, signed by the server |
| `issuing` | makes them, and keeps their secrets in the registry |

`permissions`, `keys`, `decisions` and `capabilities` do no I/O. docs/serve.md has the table of permissions; tests
compare it with the decisions made here.
"""
