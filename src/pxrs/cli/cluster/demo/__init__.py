"""`pxrs cluster demo`: a cluster whose broker and storage node are killed under load, and an account of every message.

command    the command
traffic    producers and consumers, on threads, and when each message was acknowledged and handled
pauses     pure: how long no message was acknowledged
story      what happens when, and the account
show       what is printed and drawn
"""
