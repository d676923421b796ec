"""Reading a topic as a member of a group.

`consumer.py` has `Consumer`, what users iterate over. `runner.py` calls a handler with each message, on threads, and
decides what happens to a message that the handler raised for; `dead_letters.py` sends such a message elsewhere.
`readers.py` knows which thread reads, and refuses a second one. `transactions.py` stores a checkpoint as the last
statement of a transaction in the user's own database.
"""
