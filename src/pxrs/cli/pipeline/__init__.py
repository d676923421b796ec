"""`pxrs pipeline`: runs the pipelines of a Python file on Spark, in this process, until they are stopped.

command.py    the command and its options
running.py    the Spark session, and the loop that follows the queries
file.py       loads the pipelines of a Python file
progress.py   what is shown of running queries: lines, JSON, or a table that stays in place
history.py    `--history`: the pipelines as a batch over what the sources hold
signals.py    SIGTERM and SIGINT, received when the loop asks for them
"""
