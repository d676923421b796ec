"""`pxrs cluster`: runs a whole cluster on this machine, shows one, takes storage nodes out of one.

plan       pure: which processes a local cluster has, and at which ports; kept in its directory
process    one process of it: starts, becomes ready, ends
local      all of them: their order, and which are started again
up         `pxrs cluster up`
tables     the status of a cluster for people
demo/      `pxrs cluster demo`
"""
