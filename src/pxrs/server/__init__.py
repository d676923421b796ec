"""The server: one process, one gRPC port, in front of one open hub.

| module | what it does |
|---|---|
| `settings` | the bounds of all that clients can make the server hold (W5) |
| `serving` | starts and stops the server; drains it |
| `service` | maps the methods of Arrow Flight to the modules below; errors become gRPC statuses |
| `apart` | runs a server on a thread of its own |
| `health` | gRPC's health checking |
| `grpc_port` | binds the port, and says why it cannot be had |
| `control`, `waits` | one control stream: calls; watches and subscriptions |
| `served` | what the server stands in front of |
| `calls` | what each call does with the hub |
| `given` | reads the JSON objects that clients send, and checks the arguments of calls |
| `grants` | the leases that clients have named, for commits and renewals |
| `reads`, `appends` | streams of batches out of the hub and into it |
| `staging` | rows that tasks of Spark stage from other hosts, and the calls of their drivers |
| `auth/` | who may do what: tokens, grants, the decision about each call |
| `layout` | how large a compressed batch is once decompressed |
| `budget` | bytes that may be held at a time |
| `descriptors` | how many connections leave enough open files for the hub |
| `pools` | threads for what blocks, so that nothing blocks the event loop |

The event loop of one thread owns all streams. What may block (files, registries) runs on bounded pools, and renewals of
leases have a pool of their own, so that they never wait behind other calls (W6). The server keeps nothing that its
death would lose: leases are in the registry, positions are the clients' (W2).
"""
