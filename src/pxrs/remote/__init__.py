"""A hub on another host: the `Log` and `Registry` of clients of `pxrs serve`, and the messages that both sides send.

| module | what it does |
|---|---|
| `flight` | encodes and decodes the messages of Arrow Flight's gRPC service |
| `wire` | the words of docs/wire.md: names of calls, values as JSON |
| `client/` | the client: one connection for each process, and the `Log` and `Registry` that use it |

The server is the package `pxrs.server`. Start with docs/wire.md, which says what is sent. What holds: the server keeps
nothing that its death would lose (W2); a client's lease is renewed only because that client asked; nobody but the
producer's Appender resends an append (W1); and a waiting client costs the server no thread (W6).
"""
