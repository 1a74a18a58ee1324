"""A client's side of a federation.

answering.py     the answering of tasks: verified, signed, kept
worker.py        a process that keeps a client's model loaded, and answers tasks
relay.py         the way of a task to the worker, and of the reply back
sockets.py       frames between a client's processes
consent.py       the recipe that a client follows, made of a server's and its owner's settings; the journal of recipes
policy.py        the limits of what a server's recipe may ask of a client
budget.py        the account of privacy that answers have spent
"""
