"""Consistent backups of a live hub, and their restoration as another hub.

A backup is a folder, the *target*, with copies of the files of the log, the persistent keys of the registry as they
were at one moment, and a manifest, which is written last. `making.py` has the schedule, and says why each step comes
where it does; decision 0061 has the reasons in short. `manifest.py`: the manifest as a value; `target.py`: the folder,
files that are copied once; `partitions.py`: what is copied of a partition, and where it is cut; `keys.py`: the keys of
the registry in a backup; `rebirth.py`: pure: the keys that the restored hub gets; `restoring.py`: makes a hub of a
backup.
"""
